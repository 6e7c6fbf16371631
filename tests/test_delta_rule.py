"""The three forms of the gated delta rule against the formula, against each other, and against denormal numbers."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hf_hybrid import delta_rule
from hf_hybrid.delta_rule import (
    chunk_gated_delta_rule,
    fla_gated_delta_rule,
    gated_delta_rule,
    recurrent_gated_delta_rule,
)

NAMES = ("query", "key", "value", "log_decay", "beta", "initial_state")
BATCH, HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5, 7


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads only wait for each other on tensors this small, and long so where other work runs beside the tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_inputs(length, dtype=torch.float64, batch=BATCH, heads=HEADS, key_dim=KEY_DIM, value_dim=VALUE_DIM, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = {
        "query": F.normalize(randn(batch, length, heads, key_dim), dim=-1),
        "key": F.normalize(randn(batch, length, heads, key_dim), dim=-1),
        "value": randn(batch, length, heads, value_dim),
        "log_decay": -randn(batch, length, heads).abs(),
        "beta": randn(batch, length, heads).sigmoid(),
        "initial_state": randn(batch, heads, key_dim, value_dim),
    }
    return {name: x.to(dtype) for name, x in inputs.items()}


def random_segments(length, batch=BATCH):
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(batch, length, generator=generator) < 0.1).cumsum(1)


def mixed_decays(x):
    """Every tenth token forgets nearly all, the others nearly nothing."""
    strong = torch.arange(x.shape[1]) % 10 == 3
    return torch.where(strong[:, None], math.log(1e-12), -1e-3).expand_as(x).to(x.dtype)


def correlated(x):
    """Unit vectors that all point nearly the same way."""
    return F.normalize(0.05 * x + torch.ones(x.shape[-1], dtype=x.dtype), dim=-1)


# What each regime does to the random inputs.
REGIMES = {
    "random": {},
    "decay 1e-12": {"log_decay": lambda x: torch.full_like(x, math.log(1e-12))},
    "decay 1e-4": {"log_decay": lambda x: torch.full_like(x, math.log(1e-4))},
    "no decay": {"log_decay": torch.zeros_like},
    "mixed decays": {"log_decay": mixed_decays},
    "beta 0": {"beta": torch.zeros_like},
    "beta 1, correlated, no decay": {"beta": torch.ones_like, "key": correlated, "log_decay": torch.zeros_like},
    "beta 2, correlated, no decay": {"beta": lambda x: x * 0 + 2, "key": correlated, "log_decay": torch.zeros_like},
    "zero keys": {"key": torch.zeros_like},
    "some zero keys": {"key": lambda x: x * (torch.arange(x.shape[1]) % 3 > 0)[:, None, None]},
}


def in_regime(inputs, regime):
    return inputs | {name: change(inputs[name]) for name, change in REGIMES[regime].items()}


def forward_and_gradients(form, inputs, segment_ids=None, grad_scale=1.0, **options):
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    output, state = form(**leaves, segment_ids=segment_ids, **options)
    generator = torch.Generator().manual_seed(2)
    weights = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (output, state))
    grad_outputs = [w.to(x.dtype) * grad_scale for w, x in zip(weights, (output, state), strict=True)]
    grads = torch.autograd.grad((output, state), tuple(leaves.values()), grad_outputs)
    return {"output": output, "state": state} | {f"grad {name}": grad for name, grad in zip(leaves, grads, strict=True)}


def assert_agree(actual, expected, tolerance):
    """Largest difference within `tolerance` of the largest expected magnitude (or of 1)."""
    for name, x in expected.items():
        error = (actual[name].double() - x.double()).abs().max() / x.abs().max().clamp(min=1)
        assert error <= tolerance, f"{name} is off by {error:.2e}"


@pytest.mark.parametrize("length", [1, 6])
def test_recurrence_is_the_formula(length):
    inputs = make_inputs(length)
    output, state = recurrent_gated_delta_rule(**inputs)
    q, k, v, g, beta, initial = (x.numpy() for x in inputs.values())
    for b in range(BATCH):
        for h in range(HEADS):
            s = initial[b, h]
            for t in range(length):
                decayed = np.exp(g[b, t, h]) * s
                error = v[b, t, h] - decayed.T @ k[b, t, h]
                s = decayed + beta[b, t, h] * np.outer(k[b, t, h], error)
                np.testing.assert_allclose(output[b, t, h], s.T @ q[b, t, h] / np.sqrt(KEY_DIM), atol=1e-13)
            np.testing.assert_allclose(state[b, h], s, atol=1e-13)


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 129, 290])
@pytest.mark.parametrize("regime", REGIMES)
def test_chunks_equal_recurrence(regime, length, packed):
    inputs = in_regime(make_inputs(length), regime)
    segment_ids = random_segments(length) if packed else None
    expected = forward_and_gradients(recurrent_gated_delta_rule, inputs, segment_ids)
    assert_agree(forward_and_gradients(chunk_gated_delta_rule, inputs, segment_ids), expected, 1e-11)


@pytest.mark.parametrize("regime", REGIMES)
def test_chunks_in_float32(regime):
    inputs = in_regime(make_inputs(200, torch.float32, key_dim=16), regime)
    double = {name: x.double() for name, x in inputs.items()}
    expected = forward_and_gradients(recurrent_gated_delta_rule, double)
    # Reflections in one direction undo each other: the sums are a hundred times larger than what remains of them.
    tolerance = 1e-4 if regime == "beta 2, correlated, no decay" else 2e-6
    assert_agree(forward_and_gradients(chunk_gated_delta_rule, inputs), expected, tolerance)


@pytest.mark.parametrize("form", [chunk_gated_delta_rule, recurrent_gated_delta_rule])
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_half_precision(form, dtype, tolerance):
    inputs = make_inputs(70, dtype, key_dim=16)
    inputs["log_decay"] = inputs["log_decay"].float()
    expected = forward_and_gradients(recurrent_gated_delta_rule, {name: x.double() for name, x in inputs.items()})
    actual = forward_and_gradients(form, inputs)
    assert actual["output"].dtype == dtype and actual["state"].dtype == torch.float32
    assert all(actual[f"grad {name}"].dtype == x.dtype for name, x in inputs.items())
    assert_agree(actual, expected, tolerance)


@pytest.mark.parametrize("form", [chunk_gated_delta_rule, recurrent_gated_delta_rule])
@pytest.mark.parametrize("regime", ["random", "beta 0", "zero keys"])
def test_gradients_are_the_numerical_ones(form, regime):
    inputs = in_regime(make_inputs(5, batch=1, heads=2, key_dim=2, value_dim=3), regime)
    options = {"chunk_size": 3} if form is chunk_gated_delta_rule else {}
    segment_ids = torch.tensor([[0, 0, 0, 1, 1]])

    def function(*values):
        return form(**dict(zip(NAMES, values, strict=True)), segment_ids=segment_ids, **options)

    assert torch.autograd.gradcheck(function, tuple(x.requires_grad_() for x in inputs.values()))


@pytest.mark.parametrize("form", [chunk_gated_delta_rule, recurrent_gated_delta_rule])
def test_packed_documents_equal_single_ones(form):
    inputs = make_inputs(100, batch=1)
    output, state = form(**inputs, segment_ids=torch.tensor([[2] * 30 + [3] * 69 + [7]]))
    pieces = []
    for start, stop in ((0, 30), (30, 99), (99, 100)):
        document = {name: x[:, start:stop] for name, x in inputs.items() if name != "initial_state"}
        pieces.append(form(**document, initial_state=inputs["initial_state"] if start == 0 else None))
    torch.testing.assert_close(output, torch.cat([output for output, _ in pieces], dim=1))
    torch.testing.assert_close(state, pieces[-1][1])


def test_state_carries_over_and_padding_leaves_it_alone():
    inputs = make_inputs(90)
    tokens = {name: x for name, x in inputs.items() if name != "initial_state"}
    output, state = gated_delta_rule(**inputs)
    running, pieces = inputs["initial_state"], []
    for start, stop in ((0, 65), (65, 89), (89, 90)):
        piece, running = gated_delta_rule(**{n: x[:, start:stop] for n, x in tokens.items()}, initial_state=running)
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, dim=1), output)
    torch.testing.assert_close(running, state)

    padded = {name: F.pad(x, (0, 0) * (x.dim() - 2) + (0, 50)) for name, x in tokens.items()}
    padded["query"], padded["value"] = padded["query"] + 1, padded["value"] + 1
    tokens_again = {"query": padded["query"] - 1, "value": padded["value"] - 1}
    padded_output, padded_state = gated_delta_rule(**padded | tokens_again, initial_state=inputs["initial_state"])
    torch.testing.assert_close(padded_output[:, :90], output)
    torch.testing.assert_close(padded_state, state)


class DenormalShare(TorchDispatchMode):
    """The share of denormal numbers among all that operations compute."""

    NOT_COMPUTED = (
        "alias",
        "empty",
        "clone",
        "copy",
        "pad",
        "slice",
        "view",
        "transpose",
        "permute",
        "expand",
        "squeeze",
        "select",
    )

    def __init__(self):
        super().__init__()
        self.computed = self.denormal = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        computed = not any(name in str(function) for name in self.NOT_COMPUTED)
        if computed and isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            magnitude = result.detach().abs()
            self.computed += magnitude.numel()
            self.denormal += ((magnitude > 0) & (magnitude < torch.finfo(result.dtype).tiny)).sum().item()
        return result

    @property
    def share(self):
        return self.denormal / self.computed


def only(index):
    """Zeroes every token but those at `index`."""

    def change(x):
        kept = torch.zeros_like(x)
        kept[:, index] = x[:, index]
        return kept

    return change


FADING = {
    "one value": {"value": only(0)},
    "one write": {"beta": only(0)},
    "state only": {"beta": torch.zeros_like},
    "state and last gradient": {"beta": torch.zeros_like, "grad": only(-1)},
    "a value per chunk, last gradient": {"value": only(slice(None, None, 32)), "grad": only(-1)},
    "tiny values": {"value": lambda x: x * 1e-30, "initial_state": lambda x: x * 1e-30},
    "denormal values": {"value": lambda x: x * 1e-42, "initial_state": lambda x: x * 1e-42},
    "tiny writes": {"beta": lambda x: x * 1e-14},
    "tiny gradient": {"grad": lambda x: x * 1e-15},
}


@pytest.mark.parametrize("decay", [0.6, 0.1, 1e-12, "mixed"])
@pytest.mark.parametrize("regime", FADING)
def test_hardly_anything_becomes_denormal(regime, decay):
    inputs = make_inputs(192, torch.float32, key_dim=16)
    log_decay = inputs["log_decay"]
    inputs["log_decay"] = mixed_decays(log_decay) if decay == "mixed" else torch.full_like(log_decay, math.log(decay))
    changes = dict(FADING[regime])
    change_grad = changes.pop("grad", lambda x: x)
    inputs |= {name: change(inputs[name]) for name, change in changes.items()}
    *tokens, initial_state = inputs.values()
    with DenormalShare() as counter:
        output, state, block_states = delta_rule._forward(*tokens, initial_state, 32)
        grads = change_grad(torch.ones_like(output)), torch.zeros_like(state)
        delta_rule._backward(*grads, *tokens, block_states, 32)
    assert counter.computed > 100 * output.numel()
    assert counter.share < 0.003


def test_decoding_lets_the_state_fade_to_zero():
    inputs = make_inputs(1, torch.float32)
    inputs |= {"beta": torch.zeros_like(inputs["beta"]), "log_decay": torch.full_like(inputs["log_decay"], -0.5)}
    with DenormalShare() as counter:
        for _ in range(300):
            _, inputs["initial_state"] = gated_delta_rule(**inputs)
    assert counter.denormal == 0
    assert not inputs["initial_state"].any()


@pytest.mark.parametrize("scale", [1e-18, 1e12])
def test_gradients_of_any_magnitude(scale):
    inputs = make_inputs(70, torch.float32)
    expected = forward_and_gradients(chunk_gated_delta_rule, inputs)
    actual = forward_and_gradients(chunk_gated_delta_rule, inputs, grad_scale=scale)
    for name in NAMES:
        torch.testing.assert_close(actual[f"grad {name}"] / scale, expected[f"grad {name}"], rtol=1e-4, atol=1e-5)


def test_checkpointing_and_a_second_backward_give_the_same_gradients():
    inputs = make_inputs(70, torch.float32)
    expected = forward_and_gradients(chunk_gated_delta_rule, inputs)

    def checkpointed(**arguments):
        return checkpoint(chunk_gated_delta_rule, use_reentrant=False, **arguments)

    assert_agree(forward_and_gradients(checkpointed, inputs), expected, 1e-6)

    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    output, _ = chunk_gated_delta_rule(**leaves)
    first = torch.autograd.grad(output.sum(), leaves["key"], retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), leaves["key"]), first)


@pytest.mark.parametrize("length", [1, 70])
def test_compiles_without_a_graph_break(length):
    inputs = make_inputs(length, torch.float32)
    compiled = torch.compile(gated_delta_rule, backend="aot_eager", fullgraph=True)
    segment_ids = random_segments(length)
    expected = forward_and_gradients(gated_delta_rule, inputs, segment_ids)
    assert_agree(forward_and_gradients(compiled, inputs, segment_ids), expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_keep_their_contract(dtype):
    """Schema, shapes for compilers, gradient registration: torch's own checks."""
    *tokens, state = (x.requires_grad_() for x in make_inputs(288, dtype).values())
    torch.library.opcheck(delta_rule._chunked_forward, (*tokens, state.float(), 32))
    output, final_state, block_states = (x.detach() for x in delta_rule._chunked_forward(*tokens, state.float(), 32))
    tokens = [x.detach() for x in tokens]
    torch.library.opcheck(delta_rule._chunked_backward, (output, final_state, *tokens, block_states, 32))


@pytest.mark.parametrize("length", [1, 70])
def test_autocast_leaves_the_state_in_full_precision(length):
    inputs = make_inputs(length, torch.float32)
    expected = forward_and_gradients(gated_delta_rule, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = forward_and_gradients(gated_delta_rule, inputs)
    assert_agree(actual, expected, 1e-6)


def fake_fla_kernel(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None):
    """fla's contract, one sequence after the other: with `cu_seqlens` one row and a state per sequence."""
    assert output_final_state and g.dtype == initial_state.dtype == torch.float32
    if cu_seqlens is None:
        return recurrent_gated_delta_rule(q, k, v, g, beta, initial_state=initial_state)
    assert len(q) == 1 and len(initial_state) == len(cu_seqlens) - 1
    bounds = zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
    results = [
        recurrent_gated_delta_rule(
            *(x[:, start:stop] for x in (q, k, v, g, beta)), initial_state=initial_state[index : index + 1]
        )
        for index, (start, stop) in enumerate(bounds)
    ]
    outputs, states = zip(*results, strict=True)
    return torch.cat(outputs, dim=1), torch.cat(states)


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_fla_gets_packed_rows_as_sequences(monkeypatch, packed):
    monkeypatch.setattr(delta_rule, "fla_kernel", fake_fla_kernel)
    inputs = make_inputs(40, torch.float32)
    segment_ids = random_segments(40) if packed else None
    expected = forward_and_gradients(chunk_gated_delta_rule, inputs, segment_ids)
    assert_agree(forward_and_gradients(fla_gated_delta_rule, inputs, segment_ids), expected, 1e-5)


@pytest.mark.skipif(
    not torch.cuda.is_available() or delta_rule.fla_kernel is None, reason="needs a GPU and flash-linear-attention"
)
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_fla_equals_chunks_on_gpu(packed):
    inputs = {n: x.cuda() for n, x in make_inputs(129, torch.bfloat16, key_dim=32, value_dim=64).items()}
    inputs |= {name: inputs[name].float() for name in ("log_decay", "initial_state")}
    segment_ids = random_segments(129).cuda() if packed else None
    expected = forward_and_gradients(chunk_gated_delta_rule, inputs, segment_ids)
    assert_agree(forward_and_gradients(fla_gated_delta_rule, inputs, segment_ids), expected, 3e-2)


def test_fla_missing_is_named(monkeypatch):
    monkeypatch.setattr(delta_rule, "fla_kernel", None)
    with pytest.raises(ImportError, match="flash-linear-attention"):
        fla_gated_delta_rule(**make_inputs(3))


def test_form_is_chosen_by_length(monkeypatch):
    monkeypatch.setattr(delta_rule, "recurrent_gated_delta_rule", lambda *args, **kwargs: "recurrent")
    monkeypatch.setattr(delta_rule, "chunk_gated_delta_rule", lambda *args, **kwargs: "chunk")
    monkeypatch.setattr(delta_rule, "fla_kernel", fake_fla_kernel)
    assert [gated_delta_rule(**make_inputs(length)) for length in (1, 2)] == ["recurrent", "chunk"]


@pytest.mark.parametrize("name", ["query", "value", "log_decay", "beta", "initial_state"])
def test_wrong_shape_is_named(name):
    inputs = make_inputs(4)
    inputs[name] = inputs[name][:1]
    with pytest.raises(ValueError, match=rf"^{name} has shape \(1, .* ask for \(2, "):
        gated_delta_rule(**inputs)
    with pytest.raises(ValueError, match=r"^segment_ids has shape \(2, 3\)"):
        gated_delta_rule(**make_inputs(4), segment_ids=torch.zeros(2, 3, dtype=torch.long))
