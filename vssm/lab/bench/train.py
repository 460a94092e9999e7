"""Training throughput of `vssm.training.loop` itself, and of models of transformers beside it.

| metric                                 | what                                                |
| -------------------------------------- | --------------------------------------------------- |
| `<kind>_tokens_per_second`             | median over ten windows of steps of the run's log   |
| `<kind>_tokens_per_second_p10`, `_p90` | their quantiles                                     |
| `<kind>_peak_memory_mib`               | peak memory of tensors (CUDA only)                  |
| `<kind>_parameters`                    | the number of weights                               |
| `vssm_l<L>_...`                        | the same for a vssm with L levels of latents        |
| `transformers_gpt2_...`                | peers: squared error, AdamW, the same precision     |

The first five windows, in which kernels are compiled, do not count. The data are synthetic waves in
the shape of MNIST's rows, 28 steps of 28 values, since values do not change the time. CUDA trains
the model of the preset paper-mnist, a CPU a small one.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vssm.config import KINDS, PRESETS, RunConfig
from vssm.data import DataConfig, SyntheticConfig
from vssm.lab.bench import measure
from vssm.lab.bench.measure import Record, check_sizes, model_options, number
from vssm.lab.bench.peers import MODELS, PeerModel, missing
from vssm.models import build
from vssm.runs.folder import read_log
from vssm.training.loop import train
from vssm.training.progress import Progress

__all__ = ["main_train"]

WARM, WINDOWS = 5, 10
_LENGTH = _FEATURES = 28
_EPOCH = 45  # steps; a new order of the data is drawn once an epoch


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
    where = measure.open_device(device)
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
    for name, own in models.items():
        _time(record, name, replace(run, model=replace(run.model, **own)), _our_speeds)
    for peer in MODELS if peers else ():
        if reason := missing(peer):
            record.note(f"{peer}_tokens_per_second", f"{reason} (pip install 'vssm[dev]')")
        else:
            _time(record, peer, run, _peer_speeds)
    title = f"Training, {run.model.width} wide, {run.model.layers} layers, batch {run.train.batch}"
    headings = ["model", "tokens/s", "10–90 %", "peak MiB", "parameters"]
    metrics, rows = record.metrics, []
    for name in (*model_options(KINDS, levels), *MODELS):
        key = f"{name}_tokens_per_second"
        if key in metrics:
            names = (key, f"{key}_p10", f"{key}_p90", f"{name}_parameters")
            speed, low, high, parameters = (f"{metrics[each]:,.0f}" for each in names)
            memory = number(metrics.get(f"{name}_peak_memory_mib"))
            rows.append([name, speed, f"{low}–{high}", memory, parameters])
    return record.finish(title, headings, rows)


def _run_config(
    device: torch.device,
    batch: int | None,
    steps: int | None,
    width: int | None,
    layers: int | None,
) -> RunConfig:
    """Returns a run of all windows that validates only at its end."""
    cuda, paper = device.type == "cuda", PRESETS["paper-mnist"]
    batch = (paper.train.batch if cuda else 32) if batch is None else batch
    steps = (200 if cuda else 10) if steps is None else steps
    check_sizes(batch=batch, steps=steps)
    window = -(-steps // WINDOWS)
    total = window * (WARM + WINDOWS)
    num = -(-batch * _EPOCH * 10 // 9)  # a tenth is for validation
    synthetic = SyntheticConfig(length=_LENGTH, features=_FEATURES, num=num)
    size = {
        "width": width or (paper.model.width if cuda else 128),
        "layers": layers or (paper.model.layers if cuda else 2),
    }
    often = {"log_every": window, "validate_every": total, "checkpoint_minutes": 1e6, "samples": 0}
    length = {"epochs": total, "max_steps": total, "batch": batch}
    return RunConfig(
        data=DataConfig(name="synthetic", synthetic=synthetic),
        model=replace(paper.model, **size),
        train=replace(paper.train, **length, **often, device=str(device)),
    )


def _time(
    record: Record,
    name: str,
    run: RunConfig,
    speeds_of: Callable[[str, RunConfig, torch.device], tuple[list[float], int]],
) -> None:
    """Adds the speed, the size and the peak memory of a training, or notes why there is none."""
    key = f"{name}_tokens_per_second"
    if key in record.metrics:
        return
    before = measure.memory_in_use(record.device)
    try:
        speeds, parameters = speeds_of(name, run, record.device)
    except Exception as error:  # another version of transformers may fail in its own way
        if name not in MODELS and not isinstance(error, torch.OutOfMemoryError):
            raise
        record.note(key, measure.failure(error))
        return
    median, low, high = measure.spread(speeds)
    metrics = {key: median, f"{key}_p10": low, f"{key}_p90": high, f"{name}_parameters": parameters}
    if record.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(record.device) - before
        metrics[f"{name}_peak_memory_mib"] = peak / 2**20
    record.add(metrics)


def _our_speeds(name: str, run: RunConfig, device: torch.device) -> tuple[list[float], int]:
    """Returns the tokens per second of every window, and the number of weights."""
    with tempfile.TemporaryDirectory() as folder:
        lines = read_log(train(run, Path(folder) / "run", progress=Progress()))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build(run.model).parameters())
    speeds = [line["tokens_per_second"] for line in lines if line["split"] == "train"]
    return speeds[WARM:], parameters


def _peer_speeds(name: str, run: RunConfig, device: torch.device) -> tuple[list[float], int]:
    model = PeerModel(name, _FEATURES, run.model.width, run.model.layers, _LENGTH).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.train.learning_rate, fused=True)
    x = torch.rand(run.train.batch, _LENGTH, _FEATURES, device=device)

    def window() -> None:
        for _ in range(run.train.log_every):
            with torch.autocast(device.type, torch.bfloat16, enabled=x.is_cuda):
                mean = model(x)
            optimizer.zero_grad()
            (mean.float() - x).square().sum((1, 2)).mean().backward()
            optimizer.step()

    tokens = run.train.log_every * run.train.batch * _LENGTH
    speeds = [1e3 * tokens / taken for taken in measure.take_times(window, device, WINDOWS)]
    return speeds, sum(p.numel() for p in model.parameters())
