"""A vssm whose latents have levels, each drawn for all steps at once, given the levels above.

    input              e_t = E x_t for t <= C, a learned ∅ after
    level l = 1 ... L  h = block_l(h)                                    one causal Mamba block
                       p(z^l_t | z^{<l}_{1:t}, x_{1:C}) = D(z^l_t | P_l h_t)
                       q(z^l_t | z^{<l}_{1:t}, x_{1:T}) = D(z^l_t | P_l h_t + Q_l silu(g^l_t))
                                                          g^l = R_l h + f_l(x)
                       h_t <- h_t + (E_l z^l_a)_{t-a}                    for t > C, a = a_l(t)
    likelihood         p(x_t | z_{1:t}, x_{1:C}) = P(x_t | w_t)          w = f_dec(h)

In a plain vssm the latents of different steps are drawn independently, so one shot makes steps that
do not fit together. Here the latents of level l depend on all levels above, at this and all earlier
steps: in L rounds, each parallel in time, the steps agree. One network is the prior (C = 0), the
paper's partial posterior (C > 0) and the decoder. The evidence f reads the whole sequence in both
directions (backwards only, with one layer). Training and likelihoods use it, generation does not:
generation is causal, so chunks, resuming and states of constant size work as in a plain vssm.

A level is a `Rung`. A latent of a level with span s covers s steps. It is drawn at the first of
them, a_l(t) = C + 1 + s floor((t - C - 1) / s), from the evidence of all s, and adds another vector
to each step (E_l z has a row for each). With spans that become shorter from level to level, one
latent settles what many steps share: first the whole sequence, then its parts. With span 1,
a_l(t) = t. A state holds the latents that cover steps to come; the steps after a prompt begin with
new ones.

Legend: x (B, T, D), or (B, T) tokens; z (B, T, Z), of which each level has its Z / L components in
turn; h (B, T, width); C the cut, or length of the prompt, one for each row in training; L `levels`;
A latents of a level after the cut, or in the steps of a call, T of them with span 1.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.config import ModelConfig
from vssm.distributions import Latents, Observation
from vssm.models.base import BaseModel
from vssm.nn import LatentEmbedding, Linear, MambaBlock, RMSNorm, Stack, State, embedding

Draw = Callable[[int, Latents, Tensor], Tensor]
"""From a level, p(z^l) and the query R_l h to z^l: classes (B, A, Z / L), or one-hot (B, A, Z / L,
N).
"""


class Task(NamedTuple):
    """Sequences whose first steps are known; latents explain the others."""

    e: Tensor
    """The input, (B, T, width)."""
    cut: Tensor
    """C, the steps that are known, (B,)."""
    new: Tensor
    """Which steps the latents explain, (B, T)."""
    live: tuple[Tensor, ...]
    """Which latents of each level are in use, L times (B, A): others begin after the last step."""
    evidence: tuple[Tensor, ...]
    """The evidence of each level's posterior, L times (B, A, width)."""

    def repeat(self, times: int) -> "Task":
        """Returns the batch `times` times."""

        def copies(values: Tensor) -> Tensor:
            return values.repeat(times, *[1] * (values.ndim - 1))

        known = copies(self.e), copies(self.cut), copies(self.new)
        return Task(*known, tuple(map(copies, self.live)), tuple(map(copies, self.evidence)))


class Rung(nn.Module):
    """Creates one level: a block, the prior and posterior of its latents, and their way back in.

    Arguments:
        config: The model, with all blocks that h goes through.
        span: The steps that each latent covers.
    """

    latents: int
    classes: int
    span: int

    def __init__(self, config: ModelConfig, span: int) -> None:
        super().__init__()
        self.latents, self.classes = config.latents // config.levels, config.classes
        codes, width, self.span = self.latents * self.classes, config.width, span
        self.block: MambaBlock = MambaBlock(config)
        self.norm: RMSNorm = RMSNorm(width, eps=1e-5)
        self.prior_and_query: Linear = Linear(width, codes + width)
        self.update: Linear = Linear(width, codes)
        self.embed: LatentEmbedding = LatentEmbedding(self.latents, self.classes, span * width)
        self.gather: Linear | None = Linear(span * width, width) if span > 1 else None

    def prior(self, h: Tensor) -> tuple[Latents, Tensor]:
        """Returns p(z^l_t | ...), and R_l h, the query of the posterior, (B, T, width)."""
        sizes = [self.update.out_features, self.update.in_features]
        codes, query = self.prior_and_query(self.norm(h)).split(sizes, -1)
        return self._latents(codes), query

    def posterior(self, p_z: Latents, query: Tensor, evidence: Tensor) -> Latents:
        """Returns q(z^l_t | ...), which starts from the prior and learns the difference."""
        update = self.update(F.silu(query + evidence))
        return Latents(p_z.raw + self._latents(update).raw)

    def starts(self, cut: Tensor, length: int) -> Tensor:
        """Returns the steps at which the latents begin, (B, A); some may lie past the end.

        With span 1 these are all steps, known ones too, whose latents are not used.
        """
        steps = torch.arange(0, length, self.span, device=cut.device)
        return steps.expand(len(cut), -1) if self.span == 1 else cut[:, None] + steps

    def begin(self, h: Tensor, cut: Tensor) -> Tensor:
        """Returns h (B, T, width) where latents begin, (B, A, width)."""
        return h if self.span == 1 else _take(h, self.starts(cut, h.shape[1]), past=h.shape[1])

    def read(self, f: Tensor, cut: Tensor) -> Tensor:
        """Joins the evidence f (B, T, width) of the steps that each latent covers to one vector,
        (B, A, width).
        """
        first = self.starts(cut, f.shape[1])[..., None]
        steps = (first + torch.arange(self.span, device=cut.device)).flatten(1)
        return self.gather_spans(_take(f, steps, past=steps.shape[1]))

    def gather_spans(self, f: Tensor) -> Tensor:
        """Joins each span of steps to one vector, (B, T, width) to (B, T / span, width)."""
        assert self.gather is not None
        return self.gather(f.unflatten(1, (-1, self.span)).flatten(2))

    def joined(self, z: Tensor | None, held: Tensor | None) -> tuple[Tensor, int]:
        """Joins held latents with new ones; also returns how many steps the held ones covered."""
        if held is None:
            assert z is not None
            return z, 0
        spoken = self.span - held.shape[1]
        return held[:, :1] if z is None else torch.cat([held[:, :1], z], 1), spoken

    def at_steps(self, z: Tensor | None, held: Tensor | None, length: int) -> Tensor:
        """Returns the latents, held or new, that speak for each of T steps, (B, T, Z / L)."""
        z, spoken = self.joined(z, held)
        return (
            z if self.span == 1 else z.repeat_interleave(self.span, 1)[:, spoken : spoken + length]
        )

    def tell(self, z: Tensor) -> Tensor:
        """Returns what latents say to the steps that they speak for, (B, A span, width)."""
        said = self.embed(z)
        return said if self.span == 1 else said.unflatten(-1, (self.span, -1)).flatten(1, 2)

    def tell_after(self, z: Tensor, cut: Tensor, length: int) -> Tensor:
        """Returns what they say to each of T steps, zeros up to the cut, (B, T, width)."""
        said, steps = self.tell(z), torch.arange(length, device=cut.device)
        if self.span == 1:
            return said * (steps >= cut[:, None])[..., None].to(said.dtype)
        room = F.pad(said, (0, 0, length, 0))
        return torch.take_along_dim(room, (length + steps - cut[:, None])[..., None], 1)

    def _latents(self, v: Tensor) -> Latents:
        return Latents(v.unflatten(-1, (self.latents, self.classes)))


def _take(h: Tensor, steps: Tensor, past: int) -> Tensor:
    """Returns those steps (B, J) of h (B, T, width), with zeros for up to `past` steps past the
    end.

    No step of a row comes twice: its gradient would be a sum in an order that a GPU does not keep.
    """
    return torch.take_along_dim(F.pad(h, (0, 0, 0, past)), steps[..., None], 1)


class Ladder(BaseModel):
    """Creates a vssm with levels of latents.

    Example:
        >>> sizes = {"width": 8, "layers": 2, "latents": 4, "classes": 5}
        >>> model = Ladder(ModelConfig(features=3, levels=2, **sizes))
        >>> x = torch.zeros(2, 6, 3)
        >>> task = model.task(x, cut=torch.tensor([0, 4]))
        >>> p_x, _ = model.descend(task.e, lambda level, p_z, query: p_z.mode, cut=task.cut)
        >>> p_x.log_prob(x).shape, task.new.sum(1)
        (torch.Size([2, 6]), tensor([6, 2]))
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        last = max(1, config.layers // 2)
        trunk = replace(config, layers=config.levels + last)  # which scales the blocks
        spans = config.spans or (1,) * config.levels
        self.evidence: Stack = Stack(
            config, embedding(config), max(1, spans.count(1)) * config.width
        )
        if 1 not in spans:  # no level reads it, and DDP refuses weights without a gradient
            self.evidence.out = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
        self.rungs: nn.ModuleList = nn.ModuleList(Rung(trunk, span) for span in spans)
        self.decoder: Stack = Stack(trunk, embedding(config), self.head.size, blank=True)
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
        rungs = [self.rung(level) for level in range(self.config.levels)]
        starts = [rung.starts(cut, x.shape[1]) for rung in rungs]
        ends = x.shape[1] if lengths is None else lengths.repeat(copies)[:, None]
        f = self._read(x, lengths)
        if lengths is not None:
            new = new & (steps < ends)
            f = torch.where((steps < lengths[:, None])[..., None], f, 0)
        own = iter(self.evidence.out(f).repeat(copies, 1, 1).split(self.config.width, -1))
        if self.config.spans:
            f = f.repeat(copies, 1, 1)
        live = tuple((first >= cut[:, None]) & (first < ends) for first in starts)
        evidence = tuple(next(own) if rung.span == 1 else rung.read(f, cut) for rung in rungs)
        return Task(e, cut, new, live, evidence)

    def descend(
        self, e: Tensor, draw: Draw | None, state: State | None = None, cut: Tensor | None = None
    ) -> tuple[Observation, State]:
        """Goes down all levels; returns p(x_t | z_{1:t}, x_{1:C}) of all steps, and the state after
        them.

        Arguments:
            e: The input of the steps, (B, T, width).
            draw: Draws the latents of a level that begin in these steps, if any do; None if all
                steps are known, because known steps have no latents.
            state: The state before; with a `draw` and no `cut`, it holds the latents in use.
            cut: C, the steps that have no latents, (B,), in training and for likelihoods: latents
                begin after them, and the returned state cannot be continued. By default all steps
                are new.
        """
        children: dict[str, Tensor | State] = {}
        h = e.float() if torch.is_autocast_enabled(e.device.type) else e  # as in `Stack.run`
        for level in range(self.config.levels):
            rung = self.rung(level)
            h, children[str(level)] = rung.block(
                h, None if state is None else state.child(str(level))
            )
            if draw is not None and cut is not None:
                z = draw(level, *rung.prior(rung.begin(h, cut)))
                h = h + rung.tell_after(z, cut, h.shape[1]).to(h.dtype)
            elif draw is not None:
                held = self.held(level, state)
                fresh = h[:, held.shape[1] if held is not None else 0 :: rung.span]
                z = draw(level, *rung.prior(fresh)) if fresh.shape[1] else None
                z, spoken = rung.joined(z, held)
                said = rung.tell(z)[:, spoken:]
                h = h + said[:, : h.shape[1]].to(h.dtype)
                rest = said.shape[1] - h.shape[1]
                if rest:
                    children[f"held{level}"] = z[:, -1:].expand(-1, rest, -1)
        w, children["decoder"] = self.decoder.run(
            h, None if state is None else state.child("decoder")
        )
        return self.head(w), State(children, w.shape[1] + (0 if state is None else state.position))

    def held(self, level: int, state: State | None) -> Tensor | None:
        """Returns the latents of a level that cover the next steps, or None."""
        name = f"held{level}"
        return None if state is None or name not in state.children else state[name]

    def begins(self, length: int) -> Tensor:
        """Returns which components have a latent that begins at a step, (T, Z), after an empty
        prompt.
        """
        none = torch.zeros(1, dtype=torch.int64)
        table = torch.zeros(length, self.config.levels, dtype=torch.bool)
        for level in range(self.config.levels):
            table[self.rung(level).starts(none, length)[0], level] = True
        return table.repeat_interleave(self.config.latents // self.config.levels, 1)

    def rung(self, level: int) -> Rung:
        """Returns a level, counted from 0."""
        rung = self.rungs[level]
        assert isinstance(rung, Rung)
        return rung

    def _read(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """Returns the output of the encoder, (B, T, width): its blocks read backwards and forwards
        in turns.
        """
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
        return stack.norm(e)
