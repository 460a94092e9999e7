"""The stack: input projection, residual pre-norm blocks, final norm, output projection.

    y_{1:T}, h_T = stack(x_{1:T}, h_0)

Three kinds of input are embedded: real vectors (B, T, D), tokens (B, T), and latents, given as
classes (B, T, Z) or as one-hot vectors (B, T, Z, N) through which gradients flow. A stack may also
own one `blank`, a learned input: the start of a sequence or the paper's empty token ∅.
"""

import math

import torch
from torch import Tensor, nn

from vssm.config import ModelConfig
from vssm.nn.attention import AttentionBlock
from vssm.nn.gru import GRUBlock
from vssm.nn.layers import Linear, RMSNorm
from vssm.nn.mamba import MambaBlock
from vssm.nn.state import State

__all__ = ["BLOCKS", "Stack", "sinusoids"]

BLOCKS: dict[str, type[MambaBlock | AttentionBlock | GRUBlock]] = {
    "mamba": MambaBlock,
    "attention": AttentionBlock,
    "gru": GRUBlock,
}


class Stack(nn.Module):
    """Creates a stack of `config.layers` blocks.

    Arguments:
        config: The model.
        embed: The input projection, a module that maps the input to (B, T, width).
        outputs: The number of outputs of every step.
        blank: Whether the stack owns a learned blank input.
    """

    def __init__(
        self, config: ModelConfig, embed: nn.Module, outputs: int, blank: bool = False
    ) -> None:
        super().__init__()
        attention = config.block == "attention"
        self.embed = embed
        self.blank: nn.Parameter | None = (
            nn.Parameter(torch.randn(config.width) * 0.02) if blank else None
        )
        self.blocks: nn.ModuleList = nn.ModuleList(
            BLOCKS[config.block](config) for _ in range(config.layers)
        )
        self.norm: nn.LayerNorm | RMSNorm = (nn.LayerNorm if attention else RMSNorm)(
            config.width, eps=1e-5
        )
        self.out: Linear = Linear(config.width, outputs)
        self.positional = attention  # a recurrence knows where it is, attention does not

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Maps the input of T steps to (B, T, outputs) and returns the state after them."""
        return self.run(self.embed(x), state)

    def run(self, e: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Runs the blocks on inputs that are already embedded, e (B, T, width)."""
        position, length = 0 if state is None else state.position, e.shape[1]
        if torch.is_autocast_enabled(e.device.type):
            e = e.float()  # the blocks add to it: a bfloat16 sum would round away what they add
        if self.positional:
            e = e + sinusoids(position, length, e.shape[2], e.device, e.dtype)
        children: dict[str, Tensor | State] = {}
        for i, block in enumerate(self.blocks):
            e, children[str(i)] = block(e, None if state is None else state.child(str(i)))
        return self.out(self.norm(e)), State(children, position + length)

    def blanks(self, batch: int, length: int) -> Tensor:
        """Returns the learned blank input, embedded, (B, length, width)."""
        assert self.blank is not None
        return self.blank.expand(batch, length, -1)


def sinusoids(
    position: int, length: int, width: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Returns the position code of Vaswani et al. (2017), (length, width): any length, no
    parameters.
    """
    rates = torch.exp(
        torch.arange(0, width, 2, dtype=torch.float32, device=device) * (-math.log(10000.0) / width)
    )
    angles = torch.arange(position, position + length, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)[:, :width].to(dtype)
