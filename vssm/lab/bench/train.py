"""Training throughput of `vssm.training.loop` itself, and of models of transformers beside it.

| metric                                 | what                                                |
| -------------------------------------- | --------------------------------------------------- |
| `<kind>_tokens_per_second`             | median over ten windows of steps of the run's log   |
| `<kind>_tokens_per_second_p10`, `_p90` | their quantiles                                     |
| `<kind>_ceiling_per_second`            | an upper bound for this machine, see `bench.floor`  |
| `<kind>_peak_memory_mib`               | peak memory of tensors (CUDA only)                  |
| `<kind>_parameters`                    | the number of weights                               |
| `vssm_l<L>_...`                        | the same for a vssm with L levels of latents        |
| `transformers_gpt2_...`                | peers: squared error, AdamW, the same precision     |

A run is stopped after its windows, or twenty seconds after the first, so validation and
checkpoints do not count. The first five windows, in which kernels are compiled, do not count
either. The data are synthetic waves in the shape of MNIST's rows, 28 steps of 28 values, since
values do not change the time. CUDA trains the model of the preset paper-mnist, a CPU a small one.
"""

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vssm.config import KINDS, PRESETS, RunConfig
from vssm.data import DataConfig, SyntheticConfig
from vssm.lab.bench.floor import Rates, training_ceiling
from vssm.lab.bench.measure import (
    Record,
    check_sizes,
    failure,
    memory_in_use,
    model_options,
    number,
    open_device,
    spread,
    take_times,
)
from vssm.lab.bench.peers import MODELS, PeerModel, missing
from vssm.models import build
from vssm.training.loop import train
from vssm.training.progress import Progress

__all__ = ["main_train"]

WARM, WINDOWS = 5, 10
_LENGTH = _FEATURES = 28
_SECONDS = 20.0  # after which a slow model is stopped with fewer windows
_EPOCH = 45  # steps; a new order of the data is drawn once an epoch


class _Stop(Exception):
    """Enough was measured."""


class _Windows(Progress):
    """Collects the speeds that a run logs, and stops it after enough of them."""

    def __init__(self) -> None:
        self.speeds: list[float] = []
        self.began = math.inf

    def line(self, line: dict[str, Any]) -> None:
        if line["split"] != "train":
            return
        self.speeds.append(line["tokens_per_second"])
        if len(self.speeds) == 1:  # the first window may compile for however long it takes
            self.began = time.perf_counter()
        late = len(self.speeds) > 1 and time.perf_counter() - self.began > _SECONDS
        if late or len(self.speeds) == WARM + WINDOWS:
            raise _Stop


def main_train(
    out: str | Path | None = None,
    *,
    device: str = "auto",
    kinds: Sequence[str] = KINDS,
    levels: Sequence[int] = (),
    batch: int | None = None,
    steps: int | None = None,
    width: int | None = None,
    layers: int | None = None,
    peers: bool = True,
    restart: bool = False,
) -> dict[str, Any]:
    """Times training; `vssm bench --help` describes the options."""
    options = locals()
    where = open_device(device)
    models = model_options(kinds, levels)
    run = _run_config(where, batch, steps, width, layers)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    config = {
        **{key: getattr(run.model, key) for key in ("width", "layers", "latents", "classes")},
        "data": f"synthetic rows, {_LENGTH} steps of {_FEATURES} values",
        "batch": run.train.batch,
        "precision": str(dtype).removeprefix("torch."),
        "compile": run.train.compile,
    }
    record = Record(main_train, options, where, config, dtype)
    rates = Rates.measure(where)
    for name, own in models.items():
        model = replace(run.model, **own)
        if f"{name}_tokens_per_second" not in record.metrics:
            ceiling = training_ceiling(model, run.train.batch * _LENGTH, rates)
            record.add({f"{name}_ceiling_per_second": ceiling})
            _time_ours(record, name, replace(run, model=model))
    for peer in MODELS if peers else ():
        if reason := missing(peer):
            record.note(f"{peer}_tokens_per_second", f"{reason} (pip install 'vssm[dev]')")
        elif f"{peer}_tokens_per_second" not in record.metrics:
            _time_peer(record, peer, run)
    names = [*model_options(KINDS, levels), *MODELS]
    title = f"Training, {run.model.width} wide, {run.model.layers} layers, batch {run.train.batch}"
    headings = ["model", "tokens/s", "10–90 %", "of the ceiling", "peak MiB", "parameters"]
    return record.finish(title, headings, _rows(record, names))


def _run_config(
    device: torch.device,
    batch: int | None,
    steps: int | None,
    width: int | None,
    layers: int | None,
) -> RunConfig:
    cuda, paper = device.type == "cuda", PRESETS["paper-mnist"]
    batch = (paper.train.batch if cuda else 32) if batch is None else batch
    steps = (200 if cuda else 10) if steps is None else steps
    check_sizes(batch=batch, steps=steps)
    width = width or (paper.model.width if cuda else 128)
    layers = layers or (paper.model.layers if cuda else 2)
    window = -(-steps // WINDOWS)
    beyond = 2 * window * (WARM + WINDOWS)  # steps that no run reaches
    num = -(-batch * _EPOCH * 10 // 9)  # a tenth is for validation
    synthetic = SyntheticConfig(length=_LENGTH, features=_FEATURES, num=num)
    options = replace(
        paper.train, epochs=beyond, max_steps=beyond, batch=batch, samples=0, device=str(device)
    )
    return RunConfig(
        data=DataConfig(name="synthetic", synthetic=synthetic),
        model=replace(paper.model, width=width, layers=layers),
        train=replace(options, log_every=window, validate_every=beyond, checkpoint_minutes=1e6),
    )


def _time_ours(record: Record, name: str, run: RunConfig) -> None:
    windows, before = _Windows(), memory_in_use(record.device)
    try:
        with tempfile.TemporaryDirectory() as folder:
            train(run, Path(folder) / "run", progress=windows)
    except _Stop:
        pass
    except torch.OutOfMemoryError as error:
        record.note(f"{name}_tokens_per_second", failure(error))
        return
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build(run.model).parameters())
    counted = windows.speeds[min(WARM, len(windows.speeds) - 1) :]
    if len(counted) < WINDOWS:
        text = f"the median of {len(counted)} windows, which took {_SECONDS:g} s"
        record.note(f"{name}_tokens_per_second", text)
    _add(record, name, counted, parameters, before)


def _time_peer(record: Record, peer: str, run: RunConfig) -> None:
    device, before = record.device, memory_in_use(record.device)
    model = PeerModel(peer, _FEATURES, run.model.width, run.model.layers, _LENGTH).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.train.learning_rate, fused=True)
    x = torch.rand(run.train.batch, _LENGTH, _FEATURES, device=device)

    def steps() -> None:
        for _ in range(run.train.log_every):
            _step(model, optimizer, x)

    try:
        times = take_times(steps, device, WINDOWS, _SECONDS)
    except Exception as error:  # another version of transformers may fail in its own way
        record.note(f"{peer}_tokens_per_second", failure(error))
        return
    tokens = run.train.log_every * run.train.batch * _LENGTH
    parameters = sum(p.numel() for p in model.parameters())
    _add(record, peer, [1e3 * tokens / taken for taken in times], parameters, before)


def _step(model: PeerModel, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        mean = model(x)
    optimizer.zero_grad()
    (mean.float() - x).square().sum((1, 2)).mean().backward()
    optimizer.step()


def _add(record: Record, name: str, speeds: list[float], parameters: int, before: int) -> None:
    key = f"{name}_tokens_per_second"
    median, low, high = spread(speeds)
    metrics = {key: median, f"{key}_p10": low, f"{key}_p90": high, f"{name}_parameters": parameters}
    if record.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(record.device) - before
        metrics[f"{name}_peak_memory_mib"] = peak / 2**20
    record.add(metrics)


def _rows(record: Record, names: Sequence[str]) -> list[list[str]]:
    metrics, rows = record.metrics, []
    for name in names:
        key = f"{name}_tokens_per_second"
        speed, ceiling = metrics.get(key), metrics.get(f"{name}_ceiling_per_second")
        if speed is not None:
            quantiles = (f"{metrics[f'{key}_{part}']:,.0f}" for part in ("p10", "p90"))
            share = f"{speed / ceiling:.0%}" if ceiling else ""
            memory = number(metrics.get(f"{name}_peak_memory_mib"))
            parameters = f"{metrics[f'{name}_parameters']:,.0f}"
            rows.append([name, f"{speed:,.0f}", "–".join(quantiles), share, memory, parameters])
    return rows
