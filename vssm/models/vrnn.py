"""The variational recurrent network (Chung et al., 2015), with the discrete latents of the others.

    prior          p(z_t | h_{t-1})
    posterior      q(z_t | h_{t-1}, x_t)
    likelihood     p(x_t | h_{t-1}, z_t)
    recurrence     h_t = f(h_{t-1}, x_t, z_t)          a stack of GRU blocks

Every step needs the latent drawn before it: neither training nor generation is parallel.

Legend: x (B, T, D), or (B, T) tokens; z (B, T, Z) classes, or (B, T, Z, N) one-hot in training; h
(B, 1, width), the output of the stack after the last step, kept in the state beside the stack's
own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.config import ModelConfig
from vssm.distributions import Latents, Observation
from vssm.models.base import BaseModel
from vssm.nn import LatentEmbedding, Linear, Stack, State, embedding


class Trajectory(NamedTuple):
    """The distributions along a sequence, for one draw of its latents."""

    p_x: Observation
    """p(x_t | h_{t-1}, z_t), all steps."""
    q_z: Latents
    """q(z_t | h_{t-1}, x_t), all steps."""
    p_z: Latents
    """p(z_t | h_{t-1}), all steps."""
    z: Tensor
    """The latents drawn."""
    state: State
    """The state after the last step."""


class VRNN(BaseModel):
    """Creates a variational recurrent network.

    Example:
        >>> config = ModelConfig(kind="vrnn", features=3, width=8, layers=1, latents=4, classes=5)
        >>> model, x = VRNN(config), torch.zeros(2, 6, 3)
        >>> path = model(x, draw=lambda t, q_z: q_z.sample(torch.rand(2, 1, 4)))
        >>> path.z.shape, path.p_x.log_prob(x).shape, path.q_z.kl(path.p_z).shape
        (torch.Size([2, 6, 4]), torch.Size([2, 6]), torch.Size([2, 6]))
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        width, codes = config.width, config.latents * config.classes
        self.embed_x: nn.Module = embedding(config)
        self.embed_z: LatentEmbedding = LatentEmbedding(config.latents, config.classes, width)
        self.stack: Stack = Stack(config, Linear(2 * width, width), width, blank=True)
        self.to_prior: _MLP = _MLP(width, width, codes)
        self.to_posterior: _MLP = _MLP(2 * width, width, codes)
        self.to_likelihood: _MLP = _MLP(2 * width, width, self.head.size)

    def memory(self, batch: int, state: State | None = None) -> Tensor:
        """Returns h_{t-1}, (B, 1, width): the output of the stack so far, or a learned start."""
        return self.stack.blanks(batch, 1) if state is None else state["h"]

    def prior(self, h: Tensor) -> Latents:
        """Returns p(z_t | h_{t-1}) for the steps of h."""
        return self._latents(self.to_prior(h))

    def posterior(self, h: Tensor, x: Tensor) -> Latents:
        """Returns q(z_t | h_{t-1}, x_t) for the steps of h and x."""
        return self._latents(self.to_posterior(torch.cat([h, self.embed_x(x)], -1)))

    def likelihood(self, h: Tensor, z: Tensor) -> Observation:
        """Returns p(x_t | h_{t-1}, z_t) for the steps of h and z."""
        return self.head(self.to_likelihood(torch.cat([h, self.embed_z(z)], -1)))

    def advance(self, x: Tensor, z: Tensor, state: State | None = None) -> State:
        """Returns the state after one more step, x (B, 1, D) and z (B, 1, Z)."""
        e = torch.cat([self.embed_x(x), self.embed_z(z)], -1)
        h, stack = self.stack(e, None if state is None else state.child("stack"))
        return State({"stack": stack, "h": h}, stack.position)

    def forward(
        self, x: Tensor, draw: Callable[[int, Latents], Tensor], state: State | None = None
    ) -> Trajectory:
        """Reads x, drawing every z_t from its posterior with `draw(t, q_z)`."""
        memories, posteriors, draws = [], [], []
        for t in range(x.shape[1]):
            x_t = x[:, t : t + 1]
            memories.append(self.memory(len(x), state))
            posteriors.append(self.posterior(memories[-1], x_t))
            draws.append(draw(t, posteriors[-1]))
            state = self.advance(x_t, draws[-1], state)
        assert state is not None
        h, z = torch.cat(memories, 1), torch.cat(draws, 1)
        q_z = Latents(torch.cat([q.logits for q in posteriors], 1))
        return Trajectory(self.likelihood(h, z), q_z, self.prior(h), z, state)

    def _latents(self, v: Tensor) -> Latents:
        return Latents(v.unflatten(-1, (self.config.latents, self.config.classes)))


class _MLP(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.hidden: Linear = Linear(inputs, width)
        self.out: Linear = Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.hidden(x)))
