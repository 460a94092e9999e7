"""A vssm whose latents have levels: what a step needs to know of the others is drawn before it, in parallel.

    input               e_t = E x_t for t <= C, a learned ∅ after
    level l = 1 ... L   h   = block_l(h)                                  one causal Mamba block
                        p(z^l_t | z^{<l}_{1:t}, x_{1:C})   = D(z^l_t | P_l h_t)
                        q(z^l_t | z^{<l}_{1:t}, x_{1:T})   = D(z^l_t | P_l h_t + Q_l silu(R_l h_t + f_l(x)_t))
                        h_t <- h_t + E_l z^l_t                            for t > C
    likelihood          p(x_t | z_{1:t}, x_{1:C})          = P(x_t | w_t)   w = f_dec(h)

In a plain vssm the latents of different steps are drawn independently of one another, and one shot then
makes steps that do not fit together. Here those of level l depend on all levels above, at this and all
earlier steps: in L rounds, each parallel in time, the steps agree. One network is the prior (C = 0), what the
paper calls partial posterior (C > 0) and the decoder. The evidence f reads the whole sequence, in both
directions (with one layer backwards only), and is used for training and for likelihoods only: what generates
is causal, so that chunks, resuming and constant states are those of a vssm. A level is a `Rung`.

Legend: x (B, T, D), or (B, T) tokens; z (B, T, Z), of which each level has its Z / L components in turn;
h (B, T, width); C the cut, or length of the prompt, one for each row in training; L `levels`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.config import ModelConfig
from vssm.distributions import Latents, Observation, make_head
from vssm.models.autoregressive import embedding
from vssm.nn import LatentEmbedding, MambaBlock, Stack, State
from vssm.ops.linear import Linear
from vssm.ops.norm import RMSNorm

__all__ = ["Ladder", "Rung", "Task"]

Draw = Callable[[int, Latents, Tensor], Tensor]
"""From a level, p(z^l) and the query R_l h to z^l: classes (B, T, Z / L), or one-hot (B, T, Z / L, N)."""


class Task(NamedTuple):
    """Sequences of which the first steps are known and the others are to be explained."""

    e: Tensor
    """The input, (B, T, width)."""
    new: Tensor
    """Which steps are to be explained, and have latents, (B, T)."""
    evidence: tuple[Tensor, ...]
    """What the posterior of each level knows of them, L times (B, T, width)."""

    def repeat(self, times: int) -> "Task":
        """Returns the batch `times` times."""
        evidence = tuple(part.repeat(times, 1, 1) for part in self.evidence)
        return Task(self.e.repeat(times, 1, 1), self.new.repeat(times, 1), evidence)


class Rung(nn.Module):
    """Creates one level: a block, the prior and posterior of its latents, and their way back in."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.latents, self.classes, width = config.latents // config.levels, config.classes, config.width
        codes = self.latents * self.classes
        self.block = MambaBlock(config)
        self.norm = RMSNorm(width, eps=1e-5)
        self.prior_and_query = Linear(width, codes + width)
        self.update = Linear(width, codes)
        self.embed = LatentEmbedding(self.latents, self.classes, width)

    def prior(self, h: Tensor) -> tuple[Latents, Tensor]:
        """Returns p(z^l_t | ...), and R_l h, the query of the posterior, (B, T, width)."""
        sizes = [self.update.out_features, self.update.in_features]
        codes, query = self.prior_and_query(h, norm=self.norm).split(sizes, -1)
        return self._latents(codes), query

    def posterior(self, p_z: Latents, query: Tensor, evidence: Tensor) -> Latents:
        """Returns q(z^l_t | ...), which starts from the prior: it has to learn the difference only."""
        update = self.update(F.silu(query + evidence))
        return Latents(p_z.raw + self._latents(update).raw)

    def _latents(self, v: Tensor) -> Latents:
        return Latents(v.unflatten(-1, (self.latents, self.classes)))


class Ladder(nn.Module):
    """Creates a vssm with levels of latents.

    Example:
        >>> model = Ladder(ModelConfig(features=3, width=8, layers=2, latents=4, classes=5, levels=2))
        >>> x = torch.zeros(2, 6, 3)
        >>> task = model.task(x, cut=torch.tensor([0, 4]))
        >>> p_x, _ = model.descend(task.e, lambda level, p_z, query: p_z.mode, new=task.new)
        >>> p_x.log_prob(x).shape, task.new.sum(1)
        (torch.Size([2, 6]), tensor([6, 2]))
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.head = make_head(config.head, config.features, config.sigma, config.mixtures, config.bins)
        last = max(1, config.layers // 2)
        trunk = replace(config, layers=config.levels + last)  # blocks are scaled by how many there are
        self.evidence = Stack(config, embedding(config), config.levels * config.width)
        self.rungs = nn.ModuleList(Rung(trunk) for _ in range(config.levels))
        self.decoder = Stack(trunk, embedding(config), self.head.size, blank=True)
        del self.decoder.blocks[last:]

    def task(self, x: Tensor, cut: Tensor, lengths: Tensor | None = None, copies: int = 1) -> Task:
        """Lays out sequences for training and likelihoods.

        Arguments:
            x: The sequences, (B, T, D) or tokens (B, T).
            cut: C, one for each row of the task, (copies B,).
            lengths: The steps of x that are real, (B,), where the rest is padding.
            copies: How many times the batch is repeated; the evidence is read once.
        """
        steps = torch.arange(x.shape[1], device=x.device)
        new = steps >= cut[:, None]
        known = self.decoder.embed(x).repeat(copies, 1, 1)
        e = torch.where(new[..., None], self.decoder.blanks(1, 1).to(known.dtype), known)
        if lengths is not None:
            new = new & (steps < lengths.repeat(copies)[:, None])
        evidence = self._read_evidence(x, lengths).repeat(copies, 1, 1)
        return Task(e, new, evidence.split(self.config.width, -1))

    def descend(
        self, e: Tensor, draw: Draw | None, state: State | None = None, new: Tensor | None = None
    ) -> tuple[Observation, State]:
        """Goes down all levels; returns p(x_t | z_{1:t}, x_{1:C}) of all steps, and the state after them.

        Arguments:
            e: The input of the steps, (B, T, width).
            draw: Makes the latents of a level; None where all steps are known, which have none.
            state: What came before.
            new: Which steps have latents, (B, T); all by default.
        """
        children: dict[str, Tensor | State] = {}
        h = e.float() if torch.is_autocast_enabled(e.device.type) else e  # as in `Stack.run`
        mask = None if new is None else new[..., None].to(h.dtype)
        for level in range(self.config.levels):
            rung = self.rung(level)
            h, children[str(level)] = rung.block(h, None if state is None else state.child(str(level)))
            if draw is not None:
                z = rung.embed(draw(level, *rung.prior(h))).to(h.dtype)
                h = h + z if mask is None else torch.addcmul(h, z, mask)
        w, children["decoder"] = self.decoder.run(h, None if state is None else state.child("decoder"))
        return self.head(w), State(children, w.shape[1] + (0 if state is None else state.position))

    def rung(self, level: int) -> Rung:
        """Returns a level, counted from 0."""
        rung = self.rungs[level]
        assert isinstance(rung, Rung)
        return rung

    def _read_evidence(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """Returns f(x), (B, T, L width): blocks that read backwards and forwards take turns."""
        stack, turned = self.evidence, None
        if lengths is not None:  # padding stays at the end, where no block sees it
            steps, last = torch.arange(x.shape[1], device=x.device), lengths[:, None] - 1
            turned = torch.where(steps <= last, last - steps, steps)[..., None]

        def turn(e: Tensor) -> Tensor:
            return e.flip(1) if turned is None else torch.take_along_dim(e, turned, 1)

        e = stack.embed(x)
        if torch.is_autocast_enabled(e.device.type):
            e = e.float()  # as in `Stack.run`
        for i, block in enumerate(stack.blocks):
            e = block(e)[0] if i % 2 else turn(block(turn(e))[0])
        return stack.out(stack.norm(e))
