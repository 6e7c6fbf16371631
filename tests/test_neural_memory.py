"""The chunked neural memory against the token-by-token one, whose inner gradients are autograd's."""

import pytest
import torch

from hf_hybrid.neural_memory import MemoryState, chunk_neural_memory, recurrent_neural_memory


def make_inputs(length, batch=2, heads=3, dim=4, hidden=5, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key, value = (random(batch, heads, length, dim) for _ in range(3))
    logs = [-random(batch, heads, length).abs() for _ in range(2)]
    rate = 0.05 * torch.rand(batch, heads, length, generator=generator, dtype=torch.float64)
    shapes = ((dim, hidden), (hidden, dim)) * 2
    state = MemoryState(*(0.5 * random(batch, heads, *shape) for shape in shapes))
    return [query, key / key.norm(dim=-1, keepdim=True), value, *logs, rate], state


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (3, 4), (4, 4), (13, 4), (7, 1), (6, 9)])
def test_outputs_equal_the_recurrence(length, chunk, residual):
    inputs, state = make_inputs(length)
    expected, _ = recurrent_neural_memory(*inputs, state, chunk, residual)
    actual, _ = chunk_neural_memory(*inputs, state, chunk, residual)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)


def test_the_state_after_full_chunks_equals_the_recurrence():
    inputs, state = make_inputs(8)
    _, expected = recurrent_neural_memory(*inputs, state, 4)
    _, actual = chunk_neural_memory(*inputs, state, 4)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=0)


def test_a_partial_chunk_leaves_the_state_at_its_start():
    inputs, state = make_inputs(11)
    _, expected = chunk_neural_memory(*(part[:, :, :8] for part in inputs), state, 4)
    _, actual = chunk_neural_memory(*inputs, state, 4)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.equal(theirs)


def test_rows_of_different_lengths_stop_at_their_own_chunks():
    inputs, state = make_inputs(12)
    _, actual = chunk_neural_memory(*inputs, state, 4, lengths=torch.tensor([5, 12]))
    for row, length in enumerate([4, 12]):
        own = [part[row : row + 1, :, :length] for part in inputs]
        _, expected = chunk_neural_memory(*own, MemoryState(*(part[row : row + 1] for part in state)), 4)
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine[row : row + 1], theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("residual", [True, False])
def test_outer_gradients_equal_the_recurrence(residual):
    gradients = []
    for form in (recurrent_neural_memory, chunk_neural_memory):
        inputs, state = make_inputs(11)
        leaves = [part.requires_grad_() for part in (*inputs, *state)]
        output, _ = form(*leaves[:6], MemoryState(*leaves[6:]), 4, residual)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        gradients.append(torch.autograd.grad((output * weights).sum(), leaves))
    for actual, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-8, rtol=0)


def test_gradients_pass_gradcheck():
    inputs, state = make_inputs(5, batch=1, heads=1, dim=2, hidden=3)
    leaves = [part.requires_grad_() for part in (*inputs, *state)]

    def outputs(*parts):
        output, after = chunk_neural_memory(*parts[:6], MemoryState(*parts[6:]), 2)
        return (output, *after)

    assert torch.autograd.gradcheck(outputs, leaves)


def test_strong_forgetting_stays_finite():
    inputs, state = make_inputs(9)
    inputs[3], inputs[4] = torch.full_like(inputs[3], -800.0), torch.full_like(inputs[4], -800.0)
    expected, _ = recurrent_neural_memory(*inputs, state, 4)
    actual, after = chunk_neural_memory(*inputs, state, 4)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)
    assert all(part.isfinite().all() for part in after)
