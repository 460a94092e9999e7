"""The GRU block (Cho et al., 2014): a gated recurrent layer in a residual branch.

    y_t = x_t + gru(norm(x_t), h_{t-1})

The state keeps `h` (B, width). The recurrence is not linear, so it runs step by step at any length.
"""

import torch
from torch import Tensor, nn

from vssm.config import ModelConfig
from vssm.nn.state import State

# Gates in one call: with 1.6e9 of them (50,000 rows of 168 steps), cuDNN 9 read out of bounds.
MOST_GATES = 2**28


class GRUBlock(nn.Module):
    """Creates a residual pre-norm block around a GRU layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm: nn.RMSNorm = nn.RMSNorm(config.width, eps=1e-5)
        self.gru: nn.GRU = nn.GRU(config.width, config.width, batch_first=True)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Maps x (B, T, width) to (B, T, width) and returns the state after the last step."""
        h = x.new_zeros(len(x), x.shape[2]) if state is None else state["h"]
        if x.shape[1] == 1:  # a cell: half the cost of a layer, and a CUDA graph can hold it
            h = self.cell(x, h)
            y = h[:, None]
        else:
            y, h = self._read(self.norm(x), h)
        position = x.shape[1] + (0 if state is None else state.position)
        return x + y, State({"h": h}, position)

    def _read(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Reads many steps, in several calls if their gates are too many for one."""
        ys, h = [], h[None].contiguous()
        for part in x.split(max(1, MOST_GATES // (3 * x[:, 0].numel())), 1):
            y, h = self.gru(part, h)
            ys.append(y)
        return torch.cat(ys, 1) if len(ys) > 1 else ys[0], h[0]

    def cell(self, x: Tensor, h: Tensor) -> Tensor:
        """Returns the hidden state after one step, (B, width)."""
        return torch.gru_cell(self.norm(x)[:, 0], h, *self.gru.all_weights[0])


def join_weights(model: nn.Module) -> None:
    """Lays the copied weights of GRUs side by side; otherwise cuDNN would do so at every call."""
    for part in model.modules():
        if isinstance(part, nn.GRU):
            part.flatten_parameters()
