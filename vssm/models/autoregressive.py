"""Autoregressive models: transformer, ssm and rnn. One class; the kind chooses the block.

    p(x_{1:T}) = prod_t P(x_t | w_t)          w_{1:T}, h_T = f((start, x_{1:T-1}), h_0)

The stack reads the sequence shifted by one step, after a learned start input. Its state is `stack`,
which has read everything but the last x, and `last`, that x.

Legend: x (B, T, D), or (B, T) tokens; w (B, T, size of the head).
"""

import torch
from torch import Tensor

from vssm.config import ModelConfig
from vssm.distributions import Observation
from vssm.models.base import BaseModel
from vssm.nn import Stack, State, embedding


class Autoregressive(BaseModel):
    """Creates a transformer, ssm or rnn that predicts every step from the steps before it.

    Example:
        >>> model = Autoregressive(ModelConfig(kind="ssm", features=3, width=8, layers=1))
        >>> p_x, state = model(torch.zeros(2, 5, 3))
        >>> p_x.log_prob(torch.zeros(2, 5, 3)).shape, state.position
        (torch.Size([2, 5]), 5)
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.stack: Stack = Stack(config, embedding(config), self.head.size, blank=True)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Observation, State]:
        """Returns the distributions P(x_t | w_t) of all steps of x, and the state after them."""
        e = torch.cat([self.pending(len(x), state), self.stack.embed(x[:, :-1])], 1)
        w, stack = self.stack.run(e, None if state is None else state.child("stack"))
        position = x.shape[1] + (0 if state is None else state.position)
        last = x[:, -1:].clone()  # x is the caller's, who may write to it, and may be large
        return self.head(w), State({"stack": stack, "last": last}, position)

    def next(self, batch: int, state: State | None) -> tuple[Observation, State]:
        """Returns the distribution of the next step, (B, 1, ...), and the state of the stack after
        it.
        """
        w, stack = self.stack.run(
            self.pending(batch, state), None if state is None else state.child("stack")
        )
        return self.head(w), stack

    def recompute(self, batch: int, x: Tensor | None) -> tuple[Observation, State]:
        """Does the same as `next` from x alone, (B, t - 1, D), reading all of it again."""
        e = self.pending(batch, None)
        if x is not None:
            e = torch.cat([e, self.stack.embed(x)], 1)
        w, stack = self.stack.run(e)
        return self.head(w[:, -1:]), stack

    def pending(self, batch: int, state: State | None) -> Tensor:
        """Embeds the input that the stack has not read yet: the last x, or the start."""
        return self.stack.blanks(batch, 1) if state is None else self.stack.embed(state["last"])
