"""The direct forecast of a window: the median and the mean error of each step of the horizon.

    u_{C+h} ~ Laplace(m_h, b_h)          m = a W + f(a)          b = b° exp g(a)

W and b° come from the linear forecast; f and g are the outputs of one small network, which start at
zero. So training starts at the linear forecast, and stops when held-out windows get no better. The
median of a Laplace distribution is m, and its mean error is b. A model then reads and draws the
horizon as (u - m) / b: it learns how steps depend on each other, and how their errors are spread.

Legend: a (B, I) the input, the history u_1 ... u_C and the covariates; m, b (B, H).
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from vssm.forecasting.linear import (
    Linear,
    choose_linear,
    fit_linear,
    is_close,
    spread_evenly,
    windows_apart,
)
from vssm.forecasting.windows import Windows

_WIDTH, _DROPOUT = 256, 0.1
_BATCH, _LEARNING_RATE = 128, 1e-3
_EVERY, _PATIENCE = 100, 6  # steps between validations; how many may bring nothing better
_VALID_WINDOWS = 1000
_BETTER = 0.002  # share by which a better validation is better
_EMA = 0.995


class Direct(nn.Module):
    """Creates a direct forecast that is the linear one until it is trained.

    Example:
        >>> linear = Linear(torch.ones(3, 2), torch.ones(2))
        >>> m, b = Direct(linear)(torch.ones(1, 3))
        >>> m.tolist(), b.tolist()
        ([[3.0, 3.0]], [[1.0, 1.0]])
    """

    weight: Tensor
    spread: Tensor

    def __init__(self, linear: Linear, width: int = _WIDTH) -> None:
        super().__init__()
        inputs, horizon = linear.weight.shape
        self.register_buffer("weight", linear.weight.float())
        self.register_buffer("spread", linear.spread.float())
        self.layers: nn.Sequential = nn.Sequential(
            nn.Linear(inputs, width),
            nn.GELU(),
            nn.Dropout(_DROPOUT),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Dropout(_DROPOUT),
        )
        self.out: nn.Linear = nn.Linear(width, 2 * horizon)
        for weight in self.out.parameters():
            nn.init.zeros_(weight)

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Returns m and b, (B, H) each."""
        a = a.float()
        f, g = self.out(self.layers(a)).chunk(2, -1)
        return a @ self.weight + f, self.spread * g.clamp(-5, 5).exp()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Direct":
        """Returns the forecast with the weights of a `state_dict`."""
        own = cls(Linear(tensors["weight"], tensors["spread"]), len(tensors["layers.0.bias"]))
        own.load_state_dict(dict(tensors))
        return own.eval()


class DirectChoice(NamedTuple):
    """The settings of a direct forecast that were chosen for a panel."""

    centre: str
    penalty: float
    """Of the linear forecast."""
    steps: int
    """Of the training of the network."""


def choose_direct(
    older: Windows,
    whole: Windows,
    cuts: Tensor,
    steps: int,
    seed: int,
    bar: Any,  # noqa: ANN401
) -> tuple[DirectChoice, Direct]:
    """Trains on older windows; returns the settings and the forecast that do best on held-out ones.

    The centre is the one that `choose_linear` takes, or the last value if that is clearly better.
    Without held-out windows the network is not trained.

    Arguments:
        older: The windows of training.
        whole: The windows of all data.
        cuts: The windows of `whole` that are held out.
        steps: The most steps of a training.
        seed: Fixes weights and batches.
        bar: A progress bar of rich.
    """
    usual = choose_linear(older, whole, cuts)
    if not len(cuts):
        choice = DirectChoice(*usual, 0)
        return choice, fit_direct(choice, older.centred(usual.centre), seed, bar)
    found = {}
    for centre in dict.fromkeys((usual.centre, "last")):
        choice, judge = DirectChoice(centre, usual.penalty, steps), _judge(whole, centre, cuts)
        direct, best, error = _train(choice, older.centred(centre), seed, bar, judge)
        found[centre] = choice._replace(steps=best), direct, error
    apart = windows_apart(cuts, older.layout.horizon)
    first, last = found[usual.centre], found["last"]
    choice, direct, _ = first if is_close(first[2], last[2], apart) else last
    return choice, direct


def fit_direct(choice: DirectChoice, windows: Windows, seed: int, bar: Any) -> Direct:  # noqa: ANN401
    """Returns a direct forecast with the chosen settings, trained on windows."""
    return _train(choice, windows, seed, bar)[0]


def _train(
    choice: DirectChoice,
    windows: Windows,
    seed: int,
    bar: Any,  # noqa: ANN401
    judge: Callable[[Direct], Tensor] | None = None,
) -> tuple[Direct, int, Tensor]:
    """Trains a direct forecast; with a judge, until it gets no better.

    Returns a moving average of the weights, the step after which it was best, and its error then
    in each window of the judge.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        direct = Direct(fit_linear(windows, choice.penalty))
        average = AveragedModel(direct, avg_fn=_moving_average)
        optimizer = torch.optim.AdamW(direct.parameters(), _LEARNING_RATE)
        cuts, task = windows.cuts(max(windows.layout.season, 2)), bar.add_task("direct forecast")
        kept, kept_step, waited = deepcopy(direct).eval(), 0, 0
        best = torch.zeros(0) if judge is None else judge(kept)
        for step in range(1, choice.steps + 1):
            some = cuts[torch.randint(len(cuts), (_BATCH,), generator=generator)]
            a, u, due, _ = windows.direct_task(some)
            m, b = direct(a)
            loss = torch.where(due, (u - m).abs() / b + b.log(), 0).sum() / due.sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(direct.parameters(), 1.0)
            optimizer.step()
            average.update_parameters(direct)
            bar.update(task, completed=step, total=choice.steps)
            if step % _EVERY and step < choice.steps:
                continue
            made: Any = deepcopy(average.module).eval()
            if judge is None:
                kept, kept_step = made, step
                continue
            error = judge(made)
            if error.mean() < (1 - _BETTER) * best.mean():
                kept, kept_step, best, waited = made, step, error, 0
            elif (waited := waited + 1) >= _PATIENCE:
                break
        bar.update(task, completed=choice.steps, total=max(choice.steps, 1))
    return kept, kept_step, best


def _moving_average(average: Tensor, new: Tensor, count: Tensor | int) -> Tensor:
    """Weighs all steps alike at first, then the last 1 / (1 - _EMA) of them or so."""
    return average + (new - average) * max(1 - _EMA, 1 / (1 + float(count)))


def _judge(windows: Windows, centre: str, cuts: Tensor) -> Callable[[Direct], Tensor]:
    """Returns a function from a direct forecast to its CRPS in each window, (W,)."""
    cuts = spread_evenly(cuts, _VALID_WINDOWS)
    a, u, due, size = windows.centred(centre).direct_task(cuts)
    size = size * due / due.sum(1, keepdim=True).clamp(min=1)

    @torch.no_grad()
    def error(direct: Direct) -> Tensor:
        m, b = direct(a)
        e = (u - m).abs()
        crps = e + b * (-e / b).exp() - 0.75 * b  # of a Laplace distribution
        return (crps * size).sum(1)

    return error
