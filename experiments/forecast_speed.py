"""Times forecasts with fresh models (weights do not change the time); milliseconds for all paths.

    python experiments/forecast_speed.py --device cuda --out results/forecast_h200.json

| metric                | what runs                                                            |
| --------------------- | -------------------------------------------------------------------- |
| `<kind>_p<P>_ms_t<H>` | `vssm.forecast` of H points, with P points in a step of the model    |
| `ahead_p<P>_t<H>`     | how many times faster vssm with P points a step is than rnn with one |

Recurrent models usually make one point a step. More points in a step make any model faster, so rnn
is timed with them too: the difference at equal P is what parallel generation gives. Reading the
history and scaling the paths to the units of the data count; copying them to the host does not.
"""

import itertools
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro

from vssm.config import ModelConfig
from vssm.data import Meta
from vssm.forecasting.model_forecaster import ModelForecaster
from vssm.lab.bench.measure import Record, check_sizes, model_options, number, open_device
from vssm.models import build


def time_forecasts(
    out: Path | None = None,
    device: str = "auto",
    kinds: tuple[str, ...] = ("vssm", "rnn"),
    series: int | None = None,
    paths: int | None = None,
    lengths: tuple[int, ...] = (),
    patches: tuple[int, ...] = (1, 24),
    context: int = 336,
    width: int = 64,
    layers: int = 2,
    repeats: int | None = None,
    seconds_per_point: float = 20.0,
) -> Record:
    """Times forecasts.

    Arguments:
        out: Where the JSON goes.
        device: auto, cpu or cuda.
        kinds: The models.
        series: Series that are forecast at once; 100 on CUDA, 1 on a CPU.
        paths: Sample paths of each series; 500 on CUDA, 100 on a CPU.
        lengths: Horizons.
        patches: Points in a step of the models.
        context: Points of history.
        width: Width of the models.
        layers: Depth of every stack.
        repeats: How often each call is timed.
        seconds_per_point: Seconds that all calls for one number may take.
    """
    where = open_device(device)
    cuda = where.type == "cuda"
    model_options(kinds)  # checks the kinds
    size = {
        "series": (100 if cuda else 1) if series is None else series,
        "paths": (500 if cuda else 100) if paths is None else paths,
        "context": context,
        "width": width,
        "layers": layers,
    }
    lengths = lengths or ((96, 192, 336, 720, 1440, 2880) if cuda else (96, 336))
    check_sizes(**size, lengths=lengths, patches=patches)
    command = f"python {shlex.join(sys.argv)}"
    record = Record("forecast", command, where, size, out, repeats, seconds_per_point)
    history = torch.randn(size["series"], context, 1, generator=torch.Generator().manual_seed(0))
    for length, kind, patch in itertools.product(sorted(set(lengths)), kinds, patches):
        forecast = forecaster(kind, patch, width, layers, where).forecast
        call = partial(forecast, history, length, size["paths"])
        record.time(f"{kind}_p{patch}_ms_t{length}", call)
    metrics, rows = record.metrics, []
    for kind, patch in itertools.product(kinds, patches):
        times = [metrics.get(f"{kind}_p{patch}_ms_t{h}") for h in lengths]
        rows.append([f"{kind}, P = {patch}", *map(number, times)])
    for patch in patches:
        ratios = {}
        for h in lengths:
            ours, slow = metrics.get(f"vssm_p{patch}_ms_t{h}"), metrics.get(f"rnn_p1_ms_t{h}")
            if ours and slow:
                ratios[h] = slow / ours
        record.add({f"ahead_p{patch}_t{h}": ratio for h, ratio in ratios.items()})
        if ratios:
            cells = [f"{ratios[h]:.1f}x" if h in ratios else "" for h in lengths]
            rows.append([f"rnn, P = 1 / vssm, P = {patch}", *cells])
    title = f"Forecasts in ms: {size['series']} series, {size['paths']} paths, width {width}"
    record.table(title, ["", *(f"H = {length}" for length in lengths)], rows)
    return record


def forecaster(
    kind: str, patch: int, width: int, layers: int, device: torch.device
) -> ModelForecaster:
    size: dict[str, Any] = {"features": patch, "width": width, "layers": layers, "heads": 1}
    size |= {"kind": kind, "latents": 4, "classes": 16}
    model = build(ModelConfig(head="gaussian-learned", **size)).to(device)
    data = {"name": "series", "features": patch, "length": 0, "suggested_head": ""}
    return ModelForecaster(model, Meta(**data, columns=("value",), patch=patch, windowed="window"))


if __name__ == "__main__":
    tyro.cli(time_forecasts)
