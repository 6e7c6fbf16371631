"""The continuum memory system of Hope (arXiv 2512.24695): an MLP in levels that change at different speeds.

    h = MLP_1(x),   then   h = h + MLP_l(h)   for every slower level

The paper writes a chain of MLPs, MLP_k(... MLP_1(x)); the residual connection around every level but the first is ours,
without which a chain of freshly initialised levels lets nothing through. Level l takes an optimizer step every
`cms_periods[l]` steps, on the gradients summed since its last one; at inference all levels are ordinary weights. What
counts as a step is not stated in the paper: here it is an optimizer step, see `training/cadence.py`.
"""

import torch
from torch import nn


def level_widths(intermediate_size: int, num_levels: int) -> list[int]:
    """Widths of the levels, which add up to `intermediate_size` and differ by one at most, wider ones first."""
    width, rest = divmod(intermediate_size, num_levels)
    return [width + (level < rest) for level in range(num_levels)]


class ContinuumMemory(nn.Module):
    """The levels of one layer, fastest first; together as wide, and as large, as the MLP in whose place they stand.

    Args:
        levels: one MLP a level, each `[..., hidden]` -> `[..., hidden]`.
    """

    def __init__(self, levels: list[nn.Module]):
        super().__init__()
        self.levels = nn.ModuleList(levels)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` -> `[..., hidden]`."""
        first, *slower = self.levels
        hidden_states = first(hidden_states)
        for level in slower:
            hidden_states = hidden_states + level(hidden_states)
        return hidden_states
