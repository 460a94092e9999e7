"""A vssm that conditions on any known part of a sequence, not only on a prefix.

    K, R                   the entries (t, d) that are known, and the entries to draw now
    input                  e_t = E [x_K, K, R]_t                     zeros where x is not known
    level l = 1 ... L      h = block_l(h)
                           p(z^l_t | z^{<l}, x_K, R)      = D(z^l_t | P_l h_t)
                           q(z^l_t | z^{<l}, x_K, x_R)    = D(z^l_t | P_l h_t + Q_l silu(g^l_t))
                                                            g^l = R_l h + f_l(x_K, x_R, R)
                           h_t <- h_t + (E_l z^l_a)_{t-a} at steps with an entry in R
    likelihood             p(x_R | z, x_K) = prod_{(t,d) in R} P(x_td | w_td)        w = f_dec(h)

With `spans`, s_l steps share a latent of level l, z^l_a with a = s_l floor(t / s_l): the first
levels then settle what a whole window must agree on. With span 1 every step has its own latents.

Latents make the entries agree that are drawn at once. In many passes these are few, so a model with
`latent_passes` draws no latents in more passes than that. A pass without latents reads all unknown
entries as R. There p(x_R | x_K) is a product over entries, so the pass may draw only some of them.

With `interpolate`, the input has straight lines between the known entries of a feature, the
evidence has the difference of x from these lines, and p(x_R | z, x_K) has its location relative to
them. So the model need not learn that a series is smooth. With a `season`, the input also has lines
between entries that are a season apart.

An entry in neither K nor R is missing: it is not read and not scored. A prompt is a prefix K; a gap
in a series, a hole in an image and the middle of a text are other sets K. Columns that are always
known and never drawn (`given`: labels, prices, holidays) are in K everywhere.

Blocks take turns reading forwards and backwards. A block that reads forwards reads the whole
sequence and carries its state. A block that reads backwards starts anew in each window of `window`
steps. So whole windows can be drawn one after the other from a state of constant size, with the
same result as all at once.

Legend: x (B, T, D), or (B, T) tokens, one entry per step; known K, made R, of the shape of x, bool;
z (B, T, Z), of which each level has Z / L components in turn; A = T / s_l latents of a level; h (B,
T, width); T is a multiple of the window, and the window of each span.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.config import ModelConfig
from vssm.distributions import Latents, Observation
from vssm.models.base import BaseModel
from vssm.models.ladder import Rung
from vssm.nn import Linear, MambaBlock, RMSNorm, State

Draw = Callable[[int, Latents, Tensor], Tensor]
"""From a level, p(z^l) and the query R_l h to z^l: classes (B, A, Z / L), or one-hot (B, A, Z / L,
N).
"""


class Part(NamedTuple):
    """Sequences, with the entries that are known and the entries to draw now."""

    x: Tensor
    """(B, T, D), or tokens (B, T); any finite number outside of K and R."""
    known: Tensor
    """K, of the shape of x, bool."""
    made: Tensor
    """R, of the shape of x, bool; no entry is in both."""
    latent: Tensor | bool = True
    """Whether latents are drawn, for each row (B,) or for all."""

    @property
    def live(self) -> Tensor:
        """Which steps have an entry to draw with latents, (B, T)."""
        made = self.made if self.made.ndim == 2 else self.made.any(-1)
        return made & self.latent[:, None] if isinstance(self.latent, Tensor) else made

    def live_latents(self, span: int) -> Tensor:
        """Returns which latents of a level cover a live step, (B, A)."""
        return self.live if span == 1 else self.live.unflatten(1, (-1, span)).any(-1)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Part":
        """Returns the part with a function applied to each tensor."""
        return Part._make(function(v) if isinstance(v, Tensor) else v for v in self)

    def repeat(self, times: int) -> "Part":
        """Returns the batch `times` times."""
        return self.map(lambda values: values.repeat(times, *[1] * (values.ndim - 1)))


def order_of_passes(unknown: Tensor, noise: Tensor, window: int, passes: Tensor | int) -> Tensor:
    """Divides the unknown entries of each window at random into `passes` parts of equal size.

    Arguments:
        unknown: The entries to divide, (B, T, ...), with T a multiple of the window.
        noise: Uniform numbers of the same shape.
        window: Steps in a window.
        passes: S, one for all or one for each row, (B,).

    Returns:
        The part of each entry, 0 to S - 1, of the same shape; -1 where nothing is unknown.

    Example:
        >>> unknown = torch.tensor([[True, True, True, False, True, True]])
        >>> noise = torch.tensor([[0.3, 0.9, 0.1, 0.5, 0.8, 0.2]])
        >>> order_of_passes(unknown, noise, window=6, passes=2)
        tensor([[ 0,  1,  0, -1,  1,  0]])
    """
    windows = unknown.shape[0], unknown.shape[1] // window, -1
    flat = unknown.reshape(windows)
    key = torch.where(flat, noise.reshape(windows), 2.0)  # other entries come last
    rank = key.argsort(dim=-1, stable=True).argsort(dim=-1)
    count = flat.sum(-1, keepdim=True).clamp(min=1)
    parts = passes.view(-1, 1, 1) if isinstance(passes, Tensor) else passes
    return torch.where(flat, rank * parts // count, -1).view(unknown.shape)


def interpolate(
    x: Tensor, known: Tensor, window: int, season: int = 1, otherwise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draws straight lines through the known entries of each feature, in each window alone.

    Before the first and after the last known entry a line is level.

    Arguments:
        x: The sequences, (B, T, D), with T a multiple of the window.
        known: Which entries are known, of the same shape.
        window: Steps in a window.
        season: P, a divisor of the window. With P > 1, every P-th step is a sequence of its own,
            such as the same hour of all days.
        otherwise: The line where no entry is known, of the shape of x; 0 by default.

    Returns:
        The lines, of the shape of x, and how unsure they are: log(1 + l r / (l + r)), l steps after
        a known entry and r before the next; l r / (l + r) is the variance of a random walk between
        the two. Where there is no such entry, l or r is the length of the sequence.

    Example:
        >>> x = torch.tensor([[1.0, 9.0, 9.0, 4.0, 9.0, 9.0]])[..., None]
        >>> line, unsure = interpolate(x, x < 9, window=6)
        >>> line.flatten(), (unsure.exp() - 1).flatten()[:4]
        (tensor([1., 2., 3., 4., 4., 4.]), tensor([0.0000, 0.6667, 0.6667, 0.0000]))
        >>> interpolate(x, x < 9, window=6, season=3)[0].flatten()
        tensor([1., 0., 0., 4., 0., 0.])
    """
    length = window // season
    sequences = (-1, length, season)  # (B, windows, length, P, D)
    values, known = x.unflatten(1, sequences), known.unflatten(1, sequences)
    steps = torch.arange(length, device=x.device)[:, None, None]
    first = torch.where(known, steps, -1).cummax(2).values
    last = torch.where(known, steps, length).flip(2).cummin(2).values.flip(2)
    left = torch.take_along_dim(values, first.clamp(min=0), 2)
    right = torch.take_along_dim(values, last.clamp(max=length - 1), 2)
    left, right = torch.where(first < 0, right, left), torch.where(last == length, left, right)
    line = left + (right - left) * ((steps - first) / (last - first).clamp(min=1)).to(x.dtype)
    after = torch.where(first < 0, length, steps - first)
    before = torch.where(last == length, length, last - steps)
    unsure = (after * before / (after + before).clamp(min=1)).log1p()
    none = torch.zeros_like(x) if otherwise is None else otherwise
    line = torch.where(known.any(2, keepdim=True), line, none.unflatten(1, sequences))
    return line.flatten(1, 3), unsure.to(x.dtype).flatten(1, 3)


class AnyPart(BaseModel):
    """Creates a vssm that conditions on any known part.

    Example:
        >>> sizes = {"width": 8, "layers": 2, "latents": 4, "classes": 5, "levels": 2}
        >>> model = AnyPart(ModelConfig(features=3, known="any", window=4, **sizes))
        >>> x, known = torch.rand(2, 8, 3), torch.rand(2, 8, 3) < 0.5
        >>> part = Part(x, known, ~known)
        >>> p_x, _ = model.descend(part, lambda level, p_z, query: p_z.mode)
        >>> p_x.entry_log_prob(x).shape
        torch.Size([2, 8, 3])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        last = max(1, config.layers // 2)
        trunk = replace(config, layers=config.layers + config.levels + last)  # scales the blocks
        self.embed: _EntryEmbedding = _EntryEmbedding(config)
        self.blocks: nn.ModuleList = _blocks(trunk, config.layers)
        self.spans: tuple[int, ...] = config.spans or (1,) * config.levels
        self.rungs: nn.ModuleList = nn.ModuleList(Rung(trunk, span) for span in self.spans)
        self.last_blocks: nn.ModuleList = _blocks(trunk, last)
        self.norm: RMSNorm = RMSNorm(config.width, eps=1e-5)
        self.out: Linear = Linear(config.width, self.head.size)
        if config.interpolate:
            for weight in self.out.parameters():
                nn.init.zeros_(weight)  # training starts at the lines
        self.evidence_embed: _EntryEmbedding = _EntryEmbedding(config)
        self.evidence_blocks: nn.ModuleList = _blocks(config, config.layers)
        self.evidence_norm: RMSNorm = RMSNorm(config.width, eps=1e-5)
        alone = self.spans.count(1)  # levels with longer spans gather the evidence of their steps
        self.evidence_out: Linear | None = (
            Linear(config.width, alone * config.width) if alone else None
        )

    def rung(self, level: int) -> Rung:
        """Returns a level, counted from 0."""
        rung = self.rungs[level]
        assert isinstance(rung, Rung)
        return rung

    def descend(
        self, part: Part, draw: Draw | None, state: State | None = None, length: int | None = None
    ) -> tuple[Observation, State]:
        """Goes down all levels; returns p(x_R | z, x_K), and the state after the last window.

        Arguments:
            part: The sequences, with their known entries and the entries to draw.
            draw: Draws the latents of a level; only live ones are used. None if none is live.
            state: The state after the windows before.
            length: How many steps to return the distribution of, the first ones; all by default.
        """
        blocks = _Directions(self.config.window, state)
        live = part.live[..., None]
        lines = self._lines(part)
        values, *more = lines or [part.x]
        h = blocks.run(self.blocks, self.embed(values, part.known, part.made, *more))
        for level in range(self.config.levels):
            rung = self.rung(level)
            h = blocks.run([rung.block], h)
            if draw is None:
                continue
            told = rung.tell(draw(level, *rung.prior(h[:, :: rung.span])))
            h = h + torch.where(live, told, 0).to(h.dtype)
        h = blocks.run(self.last_blocks, h)
        position = h.shape[1] + (0 if state is None else state.position)
        w = self.out(self.norm(h))
        if lines:
            w = w + F.pad(self.without_given(lines[0]), (0, self.head.size - self.head.features))
        return self.head(w[:, :length]), State(blocks.after, position)

    def evidence(self, part: Part) -> tuple[Tensor, ...]:
        """Returns f_l(x_K, x_R, R), the evidence of each level's posterior, L times (B, A, width).

        The evidence reads the whole sequence in both directions.
        """
        lines, there = self._lines(part), part.known | part.made
        values = torch.where(there, part.x - lines[0], 0) if lines else part.x
        h = self.evidence_embed(values, there, part.made, *lines[1:])
        h = self.evidence_norm(_Directions(h.shape[1], None).run(self.evidence_blocks, h))
        alone = None if self.evidence_out is None else self.evidence_out(h)
        parts = iter(() if alone is None else alone.split(self.config.width, -1))
        rungs = map(self.rung, range(self.config.levels))
        return tuple(next(parts) if rung.span == 1 else rung.gather_spans(h) for rung in rungs)

    def score(self, p_x: Observation, x: Tensor, made: Tensor) -> Tensor:
        """Returns log p(x_R | z, x_K), (B,) nats, with R as `made`."""
        made, x = self.without_given(made), self.without_given(x)
        return torch.where(made, p_x.entry_log_prob(x), 0).flatten(1).sum(1)

    def part_of_pass(self, x: Tensor, known: Tensor, order: Tensor, s: int, passes: int) -> Part:
        """Returns the part that pass s of S reads.

        Arguments:
            x: The sequences.
            known: K.
            order: The pass of each unknown entry, as `order_of_passes` divides them.
            s: The pass, from 0.
            passes: S.
        """
        latent = passes <= (self.config.latent_passes or passes)
        made = order == s if latent else order >= s
        return Part(x, known | ((order >= 0) & (order < s)), made, latent)

    def _lines(self, part: Part) -> list[Tensor]:
        """Returns the lines between known entries, and how unsure they are; nothing without
        `interpolate`.

        With a `season`, the lines between entries a season apart follow, minus the first lines, and
        how unsure they are.
        """
        window, season = self.config.window, self.config.season
        if not self.config.interpolate:
            return []
        line, unsure = interpolate(part.x, part.known, window)
        if not season:
            return [line, unsure]
        other, unsure_of_season = interpolate(part.x, part.known, window, season, otherwise=line)
        return [line, unsure, other - line, unsure_of_season]

    @property
    def most_passes(self) -> int:
        """The entries of a window that may be unknown: with so many passes, each has its own."""
        return self.config.window * (1 if self.head.tokens else self.head.features)

    def without_given(self, values: Tensor) -> Tensor:
        """Returns the features of values (B, T, D) that are not given; tokens as they are."""
        return values if self.head.tokens else values[..., : self.head.features]

    def always_known(self, known: Tensor) -> Tensor:
        """Returns a mask in which the given features are known too."""
        if not self.config.given:
            return known
        given = torch.arange(known.shape[-1], device=known.device) >= self.head.features
        return known | given

    def pad(self, values: Tensor) -> Tensor:
        """Returns values (B, T, ...) with zeros after them up to the end of a window."""
        rest = -values.shape[1] % self.config.window
        return F.pad(values, (*[0, 0] * (values.ndim - 2), 0, rest)) if rest else values


class _Directions:
    """Runs blocks that take turns in direction: forwards with a state, backwards in windows."""

    def __init__(self, window: int, state: State | None) -> None:
        self.window, self.state, self.count = window, state, 0
        self.after: dict[str, Tensor | State] = {}

    def run(self, blocks: Sequence[nn.Module] | nn.ModuleList, h: Tensor) -> Tensor:
        for block in blocks:
            if self.count % 2:
                windows = h.unflatten(1, (-1, self.window)).flatten(0, 1).flip(1)
                h = block(windows)[0].flip(1).unflatten(0, (len(h), -1)).flatten(1, 2)
            else:
                name = str(self.count)
                before = None if self.state is None else self.state.child(name)
                h, self.after[name] = block(h, before)
            self.count += 1
        return h


class _EntryEmbedding(nn.Module):
    """Embeds the known values of a step, and which of its entries are known and which to draw.

    With `interpolate`, x has values everywhere, and `more` describes the lines.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens: bool = config.head == "categorical"
        if self.tokens:  # after the vocabulary: a token to be made, a missing token
            self.table: nn.Embedding = nn.Embedding(config.features + 2, config.width)
        else:
            parts = 3 + config.interpolate + 2 * bool(config.season)
            self.linear: Linear = Linear(parts * config.features, config.width)

    def forward(self, x: Tensor, known: Tensor, made: Tensor, *more: Tensor) -> Tensor:
        """Maps inputs, (B, T, D) or (B, T) each, to (B, T, width)."""
        if self.tokens:
            made_or_missing = self.table.num_embeddings - 1 - made.long()
            e = self.table(torch.where(known, x, made_or_missing))
        else:
            x = x if more else torch.where(known, x, 0)
            parts = [x, known, made, *more]
            e = self.linear(torch.cat([v.to(self.linear.weight.dtype) for v in parts], -1))
        return e.float() if torch.is_autocast_enabled(e.device.type) else e  # as in `Stack.run`


def _blocks(config: ModelConfig, count: int) -> nn.ModuleList:
    return nn.ModuleList(MambaBlock(config) for _ in range(count))
