"""Mobius training as a ring of workers (arXiv 2607.17843): each owns one block group, and its own data.

Worker w holds the parameters, gradients and optimizer state of block group w. Its batch, *stream* w, starts there, goes
round the ring `passes` times, and comes back for the head and the loss. At step k worker w serves stream (w - k) mod P,
so every worker is busy at every step. Only hidden states travel forward, and their gradients backward, one neighbour
further each time. A group meets all P streams and sums their gradients where they arise, so its optimizer is local.
Embedding, head and final norm are the same on all workers (each worker's own with `stream_embeddings`); their gradients
are added up once for each optimizer step.

Memory: of each step only the hidden state that comes in is kept; the group runs again in the backward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_hybrid import MobiusConfig
from hf_hybrid.attention import RMSNorm, RotaryEmbedding
from hf_hybrid.decoder import DecoderLayer, build_attention_masks
from hf_hybrid.modeling_mobius import HeadwiseHybrid
from hf_hybrid.sequence_layout import SequenceLayout


@dataclass
class Ring:
    """One worker's place in the default process group, and what it has sent.

    Attributes:
        rank: the worker, and its block group.
        size: workers, and block groups.
        hidden_bytes: hidden states and their gradients sent to the neighbours so far.
        shared_bytes: gradients of shared parameters given to the sum so far.
    """

    rank: int
    size: int
    hidden_bytes: int = field(default=0)
    shared_bytes: int = field(default=0)

    @classmethod
    def of_process_group(cls) -> "Ring":
        """The place that torchrun or accelerate gave this process."""
        return cls(dist.get_rank(), dist.get_world_size())

    def shift(self, tensor: Tensor, by: int) -> Tensor:
        """Sends `tensor` to the worker `by` places on; returns what the one `by` places back sent, of its shape."""
        if self.size == 1:
            return tensor
        tensor, received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        there, back = (self.rank + by) % self.size, (self.rank - by) % self.size
        operations = [dist.P2POp(dist.isend, tensor, there), dist.P2POp(dist.irecv, received, back)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        self.hidden_bytes += tensor.numel() * tensor.element_size()
        return received

    def add_up(self, tensors: list[Tensor]) -> None:
        """Replaces each tensor by its sum over the workers."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        self.shared_bytes += flat.numel() * flat.element_size()
        for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece.view_as(tensor))


def check_ring(config: MobiusConfig, workers: int) -> None:
    """Raises `ValueError` naming the field unless a ring of `workers` can train models of `config`."""
    if config.num_block_groups != workers:
        raise ValueError(
            f"num_block_groups is {config.num_block_groups}, but the ring has {workers} workers: start one worker for "
            "each block group"
        )
    if config.depth_order != "cyclic":
        raise ValueError(f"depth_order is {config.depth_order!r}: a ring trains the cyclic order, give 'cyclic'")
    if config.attention_dropout:
        raise ValueError(
            f"attention_dropout is {config.attention_dropout}: block groups run again in the backward pass and would "
            "drop others, give 0"
        )


class RingWorker(nn.Module):
    """One block group, and what its worker needs to begin and to end a stream.

    Args:
        config: of the whole model.
        group: the block group to own.
    """

    def __init__(self, config: MobiusConfig, group: int):
        super().__init__()
        config.check_start_group(group)
        if config._attn_implementation is None:
            config._attn_implementation = "sdpa"
        self.config, self.group = config, group
        first = group * config.layers_per_group
        norm = (config.hidden_size, config.rms_norm_eps, config.norm_weights)
        # Under the names that these have in the whole model, see `whole_name`.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleDict(
            (str(index), DecoderLayer(config, index, HeadwiseHybrid(config, index)))
            for index in range(first, first + config.layers_per_group)
        )
        self.norm = RMSNorm(*norm)
        self.pass_norm = RMSNorm(*norm) if config.pass_norm else None
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary_emb = RotaryEmbedding(config) if config.uses_rotary_positions else None

    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that every worker has a copy of, by name."""
        own = ("layers.", "embed_tokens.", "lm_head.") if self.config.stream_embeddings else ("layers.",)
        return {name: weight for name, weight in self.named_parameters() if not name.startswith(own)}

    def run_group(self, hidden_states: Tensor) -> Tensor:
        """One step, `[B, T, hidden]` -> `[B, T, hidden]`: rows without padding, each one document."""
        positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        context = {
            "attention_masks": build_attention_masks(self.config, hidden_states, None),
            "layout": SequenceLayout(),
            "position_embeddings": None if self.rotary_emb is None else self.rotary_emb(hidden_states, positions),
            "position_ids": positions,
        }
        for layer in self.layers.values():
            hidden_states = layer(hidden_states, **context)
        return hidden_states

    def begin_pass(self, hidden_states: Tensor, inputs_embeds: Tensor) -> Tensor:
        """What stands before each pass after the first; a stream begins every pass at its own worker."""
        if self.pass_norm is not None:
            hidden_states = self.pass_norm(hidden_states)
        return hidden_states + inputs_embeds if self.config.input_injection else hidden_states

    def loss(self, hidden_states: Tensor, input_ids: Tensor) -> Tensor:
        """Mean next-token cross-entropy in nats, from the last step's `[B, T, hidden]`."""
        logits = self.lm_head(self.norm(hidden_states))[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), input_ids[:, 1:].flatten())

    def backward_of_streams(self, ring: Ring, input_ids: Tensor, weight: float = 1.0) -> float:
        """One batch on every worker, forward and backward: gradients of `weight` times the mean loss of all streams.

        Gradients of shared parameters are this worker's part of them, until [`RingWorker.add_up_shared`].

        Args:
            ring: this worker's place.
            input_ids: `[B, T]`, this worker's own stream; all workers give the same shape.
            weight: 1 over the batches of an optimizer step.

        Returns:
            The loss of this worker's own stream in nats per token.
        """
        steps, groups = self.config.passes * ring.size, ring.size
        embedded = self.embed_tokens(input_ids)
        # What comes into each step, and what a pass that begins before it makes it of.
        inputs, returned = [], {}
        state = embedded.detach()
        with torch.no_grad():
            for step in range(steps):
                if step and step % groups == 0:
                    returned[step] = state
                    state = self.begin_pass(state, embedded)
                inputs.append(state)
                state = ring.shift(self.run_group(state), 1)
        state = state.requires_grad_()
        loss = self.loss(state, input_ids)
        (loss * (weight / groups)).backward()
        gradient, injected = state.grad, torch.zeros_like(embedded)
        for step in reversed(range(steps)):
            gradient = self._input_gradient(self.run_group, [inputs.pop()], ring.shift(gradient, -1))[0]
            if step in returned:
                gradient, again = self._input_gradient(self.begin_pass, [returned.pop(step), embedded], gradient)
                if self.config.input_injection:
                    injected += again
        embedded.backward(gradient + injected)
        return loss.item()

    @staticmethod
    def _input_gradient(function, inputs: list[Tensor], gradient: Tensor) -> list[Tensor | None]:
        """Runs `function` again, with gradients of its parameters; returns those of its inputs."""
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        function(*leaves).backward(gradient)
        return [leaf.grad for leaf in leaves]

    def add_up_shared(self, ring: Ring) -> None:
        """Sums the gradients of shared parameters over the workers, before an optimizer step."""
        ring.add_up([weight.grad for weight in self.shared_parameters().values()])

    def clip_gradients(self, ring: Ring, max_norm: float) -> float:
        """Scales all gradients as `clip_grad_norm_` would on the whole model; returns the norm before."""
        shared = {id(weight) for weight in self.shared_parameters().values()}
        squares = torch.zeros(2, dtype=torch.float64)
        for weight in self.parameters():
            squares[int(id(weight) in shared)] += weight.grad.double().pow(2).sum().item()
        own = squares[:1].clone()
        if ring.size > 1:
            dist.all_reduce(own)
        norm = (own + squares[1:]).sqrt().item()
        for weight in self.parameters():
            weight.grad.mul_(min(1.0, max_norm / (norm + 1e-6)))
        return norm

    def whole_names(self) -> Iterator[tuple[str, str, slice | None]]:
        """Each parameter's name here, its name in the whole model, and the columns that it is there (None = all)."""
        width = self.config.hidden_size
        columns = slice(self.group * width, (self.group + 1) * width) if self.config.stream_embeddings else None
        for name, _ in self.named_parameters():
            if name.startswith("lm_head."):
                yield name, name, columns
            else:
                yield name, f"model.{name}", columns if name.startswith("embed_tokens.") else None
