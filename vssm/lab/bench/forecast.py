"""Forecasts of fresh models, since time does not depend on what was learned; milliseconds for all paths.

| name                  | what runs                                                            |
| --------------------- | -------------------------------------------------------------------- |
| `<kind>_p<P>_ms_t<H>` | `vssm.forecast` of H points, with P points in a step of the model    |
| `ahead_p<P>_t<H>`     | how many times faster vssm with P points a step is than rnn with one |

A model of recurrent steps has its usual form with one point a step. A patch of P points makes any model
faster, so rnn is timed with one too: what is left between equal P is what parallel generation gives.
Reading the history counts, and so does putting paths into the units of the data; copying them to the host
does not.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vssm.checks import check_choice
from vssm.config import KINDS, ModelConfig
from vssm.data import Meta
from vssm.forecasting.forecaster import Forecaster
from vssm.lab.bench.plot import check_plot, plot_result
from vssm.lab.bench.record import Record, number, table, typed
from vssm.lab.bench.timing import Stopwatch, check_whole, open_device
from vssm.models import build

__all__ = ["main_forecast"]


def main_forecast(
    out: str | Path | None = None,
    *,
    device: str = "auto",
    kinds: Sequence[str] = ("vssm", "rnn"),
    series: int | None = None,
    paths: int | None = None,
    lengths: Sequence[int] | None = None,
    patches: Sequence[int] = (1, 24),
    context: int = 336,
    width: int = 64,
    layers: int = 2,
    repeats: int | None = None,
    seconds_per_point: float = 20.0,
    plot: str | Path | None = None,
    restart: bool = False,
) -> dict[str, Any]:
    """Times forecasts, prints a table and writes the result as JSON if `out` says where.

    Arguments:
        out: The JSON file, written after every number; a run that was stopped goes on from it.
        device: "auto", "cpu", "cuda" or "cuda:N".
        kinds: The models.
        series: Series that are forecast at once; 100 on CUDA, 1 on a CPU.
        paths: Paths of each; 500 on CUDA, 100 on a CPU.
        lengths: Horizons H in points; 96 to 2880 on CUDA, 96 and 336 on a CPU.
        patches: Points in a step of the models, P.
        context: Points of history.
        width: Width of the models.
        layers: Depth of every stack.
        repeats: How often each call is timed; by default for a tenth of a second, 3 times or more.
        seconds_per_point: What all calls for one number may take.
        plot: Where a picture goes, .png or .svg.
        restart: Whether to forget what `out` holds.
    """
    command = typed("forecast", main_forecast, locals())
    where = open_device(device)
    check_plot(plot)
    cuda = where.type == "cuda"
    for kind in kinds:
        check_choice("kinds", kind, KINDS)
    series = (100 if cuda else 1) if series is None else series
    paths = (500 if cuda else 100) if paths is None else paths
    lengths = (
        ((96, 192, 336, 720, 1440, 2880) if cuda else (96, 336)) if lengths is None else lengths
    )
    for name, values in (
        ("series", [series]),
        ("paths", [paths]),
        ("lengths", lengths),
        ("patches", patches),
        ("context", [context]),
        ("width", [width]),
        ("layers", [layers]),
    ):
        check_whole(name, *values)
    if not 0 < max(patches, default=0) <= context:
        raise ValueError(
            f"patches={tuple(patches)} is not allowed; allowed: 1 to {context}, the context"
        )
    at_least, repeats = (0.1, 3) if repeats is None else (0.0, repeats)
    stopwatch = Stopwatch(
        where, repeats, seconds_per_point, warm=3 if cuda else 1, at_least=at_least
    )
    config = {
        "series": series,
        "paths": paths,
        "context": context,
        "width": width,
        "layers": layers,
    }
    record = Record("forecast", command, where, config, out, restart)
    history = torch.randn(series, context, 1, generator=torch.Generator().manual_seed(0))
    for length in sorted(set(lengths)):
        for kind in kinds:
            for patch in sorted(set(patches)):
                size = ModelConfig(
                    kind=kind,
                    features=patch,
                    width=width,
                    layers=layers,
                    heads=1,
                    latents=4,
                    classes=16,
                    head="gaussian-learned",
                )
                meta = Meta(
                    name="series",
                    features=patch,
                    length=0,
                    suggested_head="",
                    columns=("value",),
                    patch=patch,
                    windowed="window",
                )
                forecaster = Forecaster(build(size).to(where), meta)
                call = partial(forecaster.forecast, history, length, paths)
                stopwatch.alone(record, f"{kind}_p{patch}_ms", "", length, call)
                del forecaster, call
                stopwatch.tidy()
    _show(record, kinds, sorted(set(patches)), sorted(set(lengths)))
    made = record.made()
    if plot is not None:
        plot_result(made, plot)
    return made


def _show(
    record: Record, kinds: Sequence[str], patches: Sequence[int], lengths: Sequence[int]
) -> None:
    def at(kind: str, patch: int, length: int) -> float | None:
        return record.metrics.get(f"{kind}_p{patch}_ms_t{length}")

    names = [(kind, patch) for kind in kinds for patch in patches]
    rows = [[f"{k}, P = {p}", *(number(at(k, p, length)) for length in lengths)] for k, p in names]
    for patch in patches:
        for length in lengths:
            own, slow = at("vssm", patch, length), at("rnn", 1, length)
            if own and slow:
                record.add({f"ahead_p{patch}_t{length}": slow / own})
        ahead = [record.metrics.get(f"ahead_p{patch}_t{length}") for length in lengths]
        if any(ahead):
            rows.append(
                [f"rnn, P = 1 / vssm, P = {patch}", *(f"{v:.1f}x" if v else "" for v in ahead)]
            )
    config = record.config
    title = f"Forecasts in ms: {config['series']} series, {config['paths']} paths, width {config['width']}"
    table(title, ["", *(f"H = {length}" for length in lengths)], rows)
