"""Forecasts with fresh models (weights do not change the time); milliseconds for all paths.

| metric                | what runs                                                            |
| --------------------- | -------------------------------------------------------------------- |
| `<kind>_p<P>_ms_t<H>` | `vssm.forecast` of H points, with P points in a step of the model    |
| `ahead_p<P>_t<H>`     | how many times faster vssm with P points a step is than rnn with one |

Recurrent models usually make one point a step. More points in a step make any model faster, so rnn
is timed with them too: the difference at equal P is what parallel generation gives. Reading the
history and scaling the paths to the units of the data count; copying them to the host does not.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vssm.config import ModelConfig
from vssm.data import Meta
from vssm.forecasting.model_forecaster import ModelForecaster
from vssm.lab.bench.record import Record, number
from vssm.lab.bench.timing import Stopwatch, check_whole, model_options, open_device
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
    """Times forecasts; `vssm bench --help` describes the options."""
    options = locals()
    where = open_device(device)
    cuda = where.type == "cuda"
    model_options(kinds, ())  # checks the kinds
    size = {
        "series": (100 if cuda else 1) if series is None else series,
        "paths": (500 if cuda else 100) if paths is None else paths,
        "context": context,
        "width": width,
        "layers": layers,
    }
    lengths = lengths or ((96, 192, 336, 720, 1440, 2880) if cuda else (96, 336))
    check_whole(**size, lengths=lengths, patches=patches)
    if max(patches) > context:
        raise ValueError(
            f"patches={tuple(patches)} is not allowed; allowed: 1 to {context}, the context"
        )
    record = Record(main_forecast, options, where, size)
    at_least, repeats = (0.1, 3) if repeats is None else (0.0, repeats)
    stopwatch = Stopwatch(record, repeats, seconds_per_point, at_least)
    history = torch.randn(size["series"], context, 1, generator=torch.Generator().manual_seed(0))
    lengths, patches = sorted(set(lengths)), sorted(set(patches))
    for length, kind, patch in itertools.product(lengths, kinds, patches):
        forecaster = _forecaster(kind, patch, width, layers, where)
        call = partial(forecaster.forecast, history, length, size["paths"])
        stopwatch.time_length(f"{kind}_p{patch}_ms", "", length, call)
        del forecaster, call
        stopwatch.free_memory()
    title = f"Forecasts in ms: {size['series']} series, {size['paths']} paths, width {width}"
    headings = ["", *(f"H = {length}" for length in lengths)]
    return record.finish(title, headings, _rows(record, kinds, patches, lengths))


def _forecaster(
    kind: str, patch: int, width: int, layers: int, device: torch.device
) -> ModelForecaster:
    size: dict[str, Any] = {"features": patch, "width": width, "layers": layers, "heads": 1}
    size |= {"latents": 4, "classes": 16}
    model = build(ModelConfig(kind=kind, head="gaussian-learned", **size)).to(device)
    data = {"name": "series", "features": patch, "length": 0, "suggested_head": ""}
    return ModelForecaster(model, Meta(**data, columns=("value",), patch=patch, windowed="window"))


def _rows(
    record: Record, kinds: Sequence[str], patches: Sequence[int], lengths: Sequence[int]
) -> list[list[str]]:
    metrics = record.metrics
    rows = [
        [
            f"{kind}, P = {patch}",
            *(number(metrics.get(f"{kind}_p{patch}_ms_t{h}")) for h in lengths),
        ]
        for kind in kinds
        for patch in patches
    ]
    for patch in patches:
        ahead = {}
        for h in lengths:
            ours, slow = metrics.get(f"vssm_p{patch}_ms_t{h}"), metrics.get(f"rnn_p1_ms_t{h}")
            if ours and slow:
                ahead[h] = slow / ours
        record.add({f"ahead_p{patch}_t{h}": ratio for h, ratio in ahead.items()})
        if ahead:
            cells = [f"{ahead[h]:.1f}x" if h in ahead else "" for h in lengths]
            rows.append([f"rnn, P = 1 / vssm, P = {patch}", *cells])
    return rows
