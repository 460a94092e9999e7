"""Training throughput: `vssm.training.loop` itself, on rows that it makes up, and models of transformers beside it.

| name                          | what                                                                      |
| ----------------------------- | ------------------------------------------------------------------------- |
| `<kind>_tokens_per_second`    | median over ten windows of steps, read from the run's own log             |
| `<kind>_tokens_per_second_p10`, `_p90` | their quantiles                                                  |
| `<kind>_ceiling_per_second`   | what no training of this model can exceed, see `bench.floor`              |
| `<kind>_peak_memory_mib`      | most memory that tensors took (CUDA only)                                 |
| `<kind>_parameters`           | the number of weights                                                     |
| `vssm_l<L>_...`               | the same of a vssm with L levels of latents                               |
| `transformers_gpt2_...`       | transformers' GPT-2 and Mamba of the same width and depth, squared error, AdamW, the same precision |

A run is stopped after its windows, or twenty seconds after the first: validation and checkpoints do not count. The first five windows, in which
kernels are compiled, do not count either. The data are synthetic waves of the shape of MNIST's rows, 28 steps
of 28 values: no file is needed, and time does not depend on values. On CUDA the model is that of the preset
paper-mnist, on a CPU a small one.
"""

import gc
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vssm.config import KINDS, PRESETS, RunConfig
from vssm.data import DataConfig, SyntheticConfig
from vssm.lab.bench.floor import Rates, training_ceiling
from vssm.lab.bench.peers import PEERS, Peer, absence, remark
from vssm.lab.bench.plot import check_plot, plot_result
from vssm.lab.bench.record import Record, number, table, typed
from vssm.lab.bench.timing import check_whole, open_device, options_of, spread
from vssm.training.loop import train
from vssm.training.progress import Progress

__all__ = ["main_train"]

_WARM, _WINDOWS = 5, 10
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
        if line["split"] == "train":
            self.speeds.append(line["tokens_per_second"])
        if (
            len(self.speeds) == 1
        ):  # kernels are compiled in the first window, however long that takes
            self.began = time.perf_counter()
        if _enough(self.speeds, self.began):
            raise _Stop


def _enough(speeds: Sequence[float], began: float) -> bool:
    late = time.perf_counter() - began > _SECONDS
    return len(speeds) == _WARM + _WINDOWS or (late and len(speeds) > 1)


def main_train(
    out: str | Path | None = None,
    *,
    device: str = "auto",
    kinds: Sequence[str] | None = None,
    levels: Sequence[int] = (),
    batch: int | None = None,
    steps: int | None = None,
    width: int | None = None,
    layers: int | None = None,
    peers: bool = True,
    plot: str | Path | None = None,
    restart: bool = False,
) -> dict[str, Any]:
    """Times training, prints a table and writes the result as JSON if `out` says where.

    Arguments:
        out: The JSON file, written after every model; a run that was stopped goes on from it.
        device: "auto", "cpu", "cuda" or "cuda:N".
        kinds: The models; all six if not given.
        levels: Adds the vssm with so many levels of latents, each under the name vssm_l<L>.
        batch: Sequences in a step; the preset's on CUDA, 32 on a CPU.
        steps: Steps that are timed, in ten windows; 200 on CUDA, 10 on a CPU.
        width: Width of the models; the preset's on CUDA, 128 on a CPU.
        layers: Depth of every stack; the preset's on CUDA, 2 on a CPU.
        peers: Whether to train the models of transformers.
        plot: Where a picture goes, .png or .svg.
        restart: Whether to forget what `out` holds.
    """
    command = typed("train", main_train, locals())
    where = open_device(device)
    check_plot(plot)
    models = options_of(KINDS if kinds is None else kinds, levels)
    run = _run_config(where, batch, steps, width, layers)
    size = {key: getattr(run.model, key) for key in ("width", "layers", "latents", "classes")}
    config = {
        **size,
        "data": f"synthetic rows, {_LENGTH} steps of {_FEATURES} values",
        "batch": run.train.batch,
        "precision": "bfloat16" if where.type == "cuda" else "float32",
        "compile": run.train.compile,
    }
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    record = Record("train", command, where, config, out, restart, dtype)
    rates = Rates.measure(where)
    for name, options in models.items():
        own = replace(run, model=replace(run.model, **options))
        if f"{name}_ceiling_per_second" not in record.metrics:
            ceiling = training_ceiling(own.model, own.train.batch * _LENGTH, rates)
            record.add({f"{name}_ceiling_per_second": ceiling})
        if f"{name}_tokens_per_second" not in record.metrics:
            _ours(record, name, own, where)
    for peer in PEERS if peers else ():
        if f"{peer}_tokens_per_second" not in record.metrics:
            _theirs(record, peer, run, where)
    rows = [
        [
            name,
            f"{speed:,.0f}",
            "–".join(
                f"{record.metrics[f'{name}_tokens_per_second_{part}']:,.0f}"
                for part in ("p10", "p90")
            ),
            f"{speed / ceiling:.0%}"
            if (ceiling := record.metrics.get(f"{name}_ceiling_per_second"))
            else "",
            number(record.metrics.get(f"{name}_peak_memory_mib")),
            f"{record.metrics[f'{name}_parameters']:,.0f}",
        ]
        for name in (*options_of(KINDS, levels), *PEERS)
        if (speed := record.metrics.get(f"{name}_tokens_per_second")) is not None
    ]
    title = f"Training, {size['width']} wide, {size['layers']} layers, batch {run.train.batch}"
    table(title, ["model", "tokens/s", "10–90 %", "of the ceiling", "peak MiB", "parameters"], rows)
    made = record.made()
    if plot is not None:
        plot_result(made, plot)
    return made


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
    check_whole("batch", batch)
    check_whole("steps", steps)
    window = -(-steps // _WINDOWS)
    total = window * (_WARM + _WINDOWS)
    model = replace(
        paper.model,
        width=width or (paper.model.width if cuda else 128),
        layers=layers or (paper.model.layers if cuda else 2),
    )
    num = -(-batch * _EPOCH * 10 // 9)  # a tenth is for validation
    data = DataConfig(
        name="synthetic", synthetic=SyntheticConfig(length=_LENGTH, features=_FEATURES, num=num)
    )
    options = replace(
        paper.train,
        epochs=2 * total,
        max_steps=2 * total,
        batch=batch,
        log_every=window,
        validate_every=2 * total,  # never: the run is stopped before
        checkpoint_minutes=1e6,
        samples=0,
        device=str(device),
    )
    return RunConfig(data=data, model=model, train=options)


def _ours(record: Record, name: str, run: RunConfig, device: torch.device) -> None:
    windows, before = _Windows(), _memory(device)
    try:
        with tempfile.TemporaryDirectory() as folder:
            train(run, Path(folder) / "run", progress=windows)
    except _Stop:
        pass
    except torch.OutOfMemoryError:
        record.note(f"{name}_tokens_per_second", "does not fit the device's memory")
        return
    from vssm.models import build

    with torch.device("meta"):
        parameters = sum(p.numel() for p in build(run.model).parameters())
    _write(record, name, windows.speeds, parameters, before, device)


def _theirs(record: Record, peer: str, run: RunConfig, device: torch.device) -> None:
    reason = absence()
    if reason is not None:
        record.note(f"{peer}_tokens_per_second", reason)
        return
    if told := remark(peer):
        record.note(peer, told)
    before = _memory(device)
    model = Peer(peer, _FEATURES, run.model.width, run.model.layers, _LENGTH).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.train.learning_rate, fused=True)
    x = torch.rand(run.train.batch, _LENGTH, _FEATURES, device=device)
    tokens, speeds, began = run.train.log_every * run.train.batch * _LENGTH, [], time.perf_counter()
    try:
        while not _enough(speeds, began):
            start = time.perf_counter()
            for _ in range(run.train.log_every):
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    mean = model(x)
                optimizer.zero_grad()
                (mean.float() - x).square().sum((1, 2)).mean().backward()
                optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            speeds.append(tokens / (time.perf_counter() - start))
    except Exception as error:  # another version of transformers may fail in its own way
        record.fail(f"{peer}_tokens_per_second", error)
        return
    _write(record, peer, speeds, sum(p.numel() for p in model.parameters()), before, device)


def _write(
    record: Record,
    name: str,
    speeds: Sequence[float],
    parameters: int,
    before: int,
    device: torch.device,
) -> None:
    counted, key = speeds[min(_WARM, len(speeds) - 1) :], f"{name}_tokens_per_second"
    if len(counted) < _WINDOWS:
        record.note(
            key, f"the median of {len(counted)} windows, all that fitted into {_SECONDS:g} s"
        )
    median, low, high = spread(counted)
    metrics: dict[str, float | None] = {key: median, f"{key}_p10": low, f"{key}_p90": high}
    metrics[f"{name}_parameters"] = parameters
    if device.type == "cuda":
        metrics[f"{name}_peak_memory_mib"] = (
            torch.cuda.max_memory_allocated(device) - before
        ) / 2**20
    record.add(metrics)


def _memory(device: torch.device) -> int:
    """Returns the bytes that are taken before a training, and starts to watch for the most."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
