"""Which positions of a batch are real, and where each sequence starts.

A softmax layer is told by its mask which tokens it may see. A recurrent layer has no mask: what it has read
stays in its state. So that padding on any side, padding in the middle, packed documents and chunks with a
cache all equal the plain run of each sequence alone, every recurrent mixer works on *compacted* rows: the real
tokens of a row first, in order, its padding last, and the documents of a packed row numbered.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.masking_utils import find_packed_sequence_indices


def _is_tracing() -> bool:
    """Inside a traced graph Python may not branch on the values of a tensor."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


@dataclass
class SequenceLayout:
    """How the rows of one forward pass are laid out for recurrent mixers.

    Attributes:
        is_real (`torch.BoolTensor` `[B, T]`, *optional*): which places of a *compacted* row hold a token; `None` = all.
        order (`torch.LongTensor` `[B, T]`, *optional*): place of the original row that each compacted place
            takes its token from; `None` = rows are compact already.
        document_ids (`torch.LongTensor` `[B, T]`, *optional*): number of the document that each place of the
            *original* row belongs to; `None` = one document a row.
    """

    is_real: torch.Tensor | None = None
    order: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None

    def __post_init__(self):
        self.inverse_order = None if self.order is None else self.order.argsort(dim=1)
        self.segment_ids = None if self.document_ids is None else self._carry_last_segment()

    def _carry_last_segment(self) -> torch.Tensor:
        """Document numbers in compacted order; padding takes the number of the row's last real token."""
        segments = self.compact(self.document_ids)
        if self.is_real is None:
            return segments
        return segments.masked_fill(~self.is_real, 0).cummax(dim=1).values

    @staticmethod
    def _permute(rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        if order is None:
            return rows
        index = order.view(*order.shape, *[1] * (rows.dim() - 2)).expand_as(rows)
        return rows.gather(1, index)

    def compact(self, rows: torch.Tensor) -> torch.Tensor:
        """Original order -> real tokens first. `rows`: `[B, T, ...]`."""
        return self._permute(rows, self.order)

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """Undoes `compact`. `rows`: `[B, T, ...]`."""
        return self._permute(rows, self.inverse_order)

    def blank_padding(self, rows: torch.Tensor) -> torch.Tensor:
        """Zeroes the padded places of compacted `rows` `[B, T, ...]`."""
        if self.is_real is None:
            return rows
        return rows.masked_fill(~self.is_real.view(*self.is_real.shape, *[1] * (rows.dim() - 2)), 0)

    def last_places(self, count: int, history: int, length: int) -> torch.Tensor | slice:
        """Where the last `count` tokens of each row stand, in compacted rows that follow `history` older places.

        Args:
            count: how many places to name.
            history: how many older places were put in front of the row.
            length: T, the places of the row itself.

        Returns:
            `torch.LongTensor` `[B, count]`, or one slice when all rows end at the same place.
        """
        if self.is_real is None:
            return slice(history + length - count, history + length)
        ends = history + self.is_real.sum(dim=1, keepdim=True)
        return ends - count + torch.arange(count, device=ends.device)

    def first_tokens(self) -> torch.Tensor | None:
        """`[B, T]`, True where a document after the row's first one starts (compacted order); None if none does."""
        if self.segment_ids is None:
            return None
        changes = self.segment_ids.diff(dim=1) != 0
        return torch.cat([torch.zeros_like(changes[:, :1]), changes], dim=1)


def read_padding(attention_mask: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """The mask of this pass's own tokens, or None when nothing is padded.

    Args:
        attention_mask: `[B, past + T]`, nonzero = real; None; or a mask of another rank, which says nothing of padding.
        length: T, the tokens of this pass.
    """
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    own = attention_mask[:, -length:].bool().contiguous()
    # A padded row is rare and costs a gather in every recurrent layer: look before, where looking is allowed.
    if not _is_tracing() and own.all():
        return None
    return own


def has_inner_padding(attention_mask: torch.Tensor | None) -> bool:
    """Whether padding stands between two real tokens of a row of `attention_mask` `[B, S]`; False inside a trace."""
    if attention_mask is None or attention_mask.ndim != 2 or _is_tracing():
        return False
    count = attention_mask.bool().cumsum(dim=1)
    return bool((~attention_mask.bool() & (count > 0) & (count < count[:, -1:])).any())


def real_token_window(attention_mask: torch.Tensor, window: int) -> Callable:
    """A mask function (as transformers' masking utilities take them): the last `window` real tokens, itself included.

    Args:
        attention_mask: `[B, S]`, nonzero = real; S places are both asked and looked at.
        window: in tokens.
    """
    count = attention_mask.long().cumsum(dim=1)

    def inside(batch_idx, head_idx, q_idx, kv_idx):
        return count[batch_idx, q_idx] - count[batch_idx, kv_idx] < window

    return inside


def check_shapes(
    batch_size: int,
    length: int,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    *,
    has_past: bool,
    is_recurrent: bool,
) -> None:
    """Raises `ValueError` where there is nothing to read, or a mask or positions do not fit `[batch_size, length]`.

    Args:
        has_past: whether a cache is given, whose tokens the mask covers as well.
        is_recurrent: whether some layer can't follow a mask of four dimensions.
    """
    if batch_size == 0 or length == 0:
        raise ValueError(f"the input is {batch_size} rows of {length} tokens: give at least one row of one token")
    if attention_mask is not None:
        if not isinstance(attention_mask, torch.Tensor):
            raise ValueError(f"attention_mask is a {type(attention_mask).__name__}: give a tensor [batch, tokens]")
        shape = list(attention_mask.shape)
        if len(shape) not in ((2,) if is_recurrent else (2, 4)):
            raise ValueError(
                f"attention_mask has shape {shape}: give [batch, tokens], nonzero at real tokens"
                + (
                    "; recurrent heads can't follow a mask of pairs, packed rows come as position_ids"
                    if is_recurrent
                    else ""
                )
            )
        if len(shape) == 2 and (shape[0] != batch_size or shape[1] < length or (shape[1] > length and not has_past)):
            raise ValueError(
                f"attention_mask has shape {shape}, but the input is [{batch_size}, {length}]: give a column for each "
                "cached and each new token"
            )
    if position_ids is not None and (
        position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch_size) or position_ids.shape[1] != length
    ):
        raise ValueError(
            f"position_ids have shape {list(position_ids.shape)}, but the input is [{batch_size}, {length}]: give one "
            "position a token"
        )


def read_documents(
    position_ids: torch.Tensor | None,
    is_real: torch.Tensor | None,
    cu_seq_lens: torch.Tensor | None,
    batch_size: int,
    length: int,
) -> torch.Tensor | None:
    """Numbers the documents of packed rows.

    Args:
        position_ids: `[B or 1, T]` as given by the caller, or None.
        is_real: `[B, T]` from [`read_padding`], or None.
        cu_seq_lens: `[N + 1]` cumulative document lengths of one flattened row, or None.
        batch_size: B.
        length: T.

    Returns:
        `[B, T]` document numbers, or None when each row is one document.

    Raises:
        ValueError: `cu_seq_lens` with more than one row, or not growing from 0 to T.
    """
    if cu_seq_lens is not None:
        if not isinstance(cu_seq_lens, torch.Tensor):
            raise ValueError(f"cu_seq_lens is a {type(cu_seq_lens).__name__}: give a tensor of whole numbers")
        if batch_size != 1:
            raise ValueError(
                f"cu_seq_lens describes one flattened row, but the batch has {batch_size} rows: flatten it to [1, T]"
            )
        if not _is_tracing():
            ends = cu_seq_lens.tolist()
            if ends[:1] != [0] or ends[-1] != length or ends != sorted(ends):
                raise ValueError(f"cu_seq_lens is {ends}: give lengths summed up, from 0 to the row's {length} tokens")
        places = torch.arange(length, device=cu_seq_lens.device, dtype=cu_seq_lens.dtype)
        return torch.bucketize(places, cu_seq_lens[1:], right=True)[None]
    if position_ids is None or length == 1:
        return None
    if is_real is None:
        documents = find_packed_sequence_indices(position_ids)
        return None if documents is None else documents.expand(batch_size, length)
    # Positions may jump over padding inside a row, so among real tokens only going back starts a new document.
    positions = position_ids.expand(batch_size, length)
    places = torch.arange(length, device=positions.device).expand(batch_size, length)
    last_real = torch.where(is_real, places, -1).cummax(dim=1).values
    previous = torch.nn.functional.pad(last_real, (1, 0), value=-1)[:, :-1]
    starts = is_real & (previous >= 0) & (positions <= positions.gather(1, previous.clamp(min=0)))
    if not _is_tracing() and not starts.any():
        return None
    return starts.cumsum(dim=1)


def lay_out(is_real: torch.Tensor | None, document_ids: torch.Tensor | None) -> SequenceLayout:
    """Builds the layout of one pass from [`read_padding`] and [`read_documents`]."""
    order = None
    if is_real is not None:
        in_order = is_real.shape[1] == 1 or (not _is_tracing() and bool((is_real[:, :-1] >= is_real[:, 1:]).all()))
        if not in_order:
            # A stable sort of "is padding" keeps the real tokens in their order; its shape does not depend on the data.
            order = (~is_real).to(torch.uint8).argsort(dim=1, stable=True)
            is_real = is_real.gather(1, order)
    return SequenceLayout(is_real=is_real, order=order, document_ids=document_ids)


def default_position_ids(
    attention_mask: torch.Tensor | None,
    document_ids: torch.Tensor | None,
    past_length: int | torch.Tensor,
    length: int,
    device: torch.device,
) -> torch.Tensor:
    """Positions counted over real tokens, from 0 at the start of each document.

    Returns:
        `torch.LongTensor` `[B or 1, T]`.
    """
    if attention_mask is not None and attention_mask.ndim == 2:
        positions = attention_mask.long().cumsum(dim=-1) - 1
        positions = positions.clamp(min=0)[:, -length:]
    else:
        positions = torch.arange(length, device=device)[None] + past_length
    if document_ids is None:
        return positions
    starts = torch.nn.functional.pad(document_ids.diff(dim=1) != 0, (1, 0), value=True)
    return positions - torch.where(starts, positions, 0).cummax(dim=1).values
