"""The GRU block (Cho et al., 2014): a gated recurrent layer in a residual branch.

    y_t = x_t + gru(norm(x_t), h_{t-1})

The state keeps `h` (B, width). The recurrence is not linear, so it runs step by step at any length.
"""

import torch
from torch import Tensor, nn

from vssm.config import ModelConfig
from vssm.nn.state import State

__all__ = ["GRUBlock"]


class GRUBlock(nn.Module):
    """Creates a residual pre-norm block around a GRU layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.gru = nn.GRU(config.width, config.width, batch_first=True)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Maps x (B, T, width) to (B, T, width) and returns the state after the last step."""
        e, h = self.norm(x), None if state is None else state["h"]
        if x.shape[1] == 1:  # a cell: half the cost of a layer, and a CUDA graph can hold it
            h = e.new_zeros(len(e), e.shape[2]) if h is None else h
            weights = self.gru.weight_ih_l0, self.gru.weight_hh_l0, self.gru.bias_ih_l0, self.gru.bias_hh_l0
            h = torch.gru_cell(e[:, 0], h, *weights)  # type: ignore[arg-type]
            y = h[:, None]
        else:
            y, last = self.gru(e, None if h is None else h[None].contiguous())
            h = last[0]
        position = x.shape[1] + (0 if state is None else state.position)
        return x + y, State({"h": h}, position)
