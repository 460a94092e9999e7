"""Training throughput of `vssm.training.loop` itself.

| metric                                 | what                                                |
| -------------------------------------- | --------------------------------------------------- |
| `<kind>_tokens_per_second`             | median over ten windows of steps of the run's log   |
| `<kind>_tokens_per_second_p10`, `_p90` | their quantiles                                     |
| `<kind>_peak_memory_mib`               | peak memory of tensors (CUDA only)                  |
| `<kind>_parameters`                    | the number of weights                               |
| `vssm_l<L>_...`                        | the same for a vssm with L levels of latents        |

The first five windows, in which kernels are compiled, do not count. The data are synthetic waves in
the shape of MNIST's rows, 28 steps of 28 values, since values do not change the time. CUDA trains
the model of the preset paper-mnist, a CPU a small one.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from vssm.config import KINDS, PRESETS, RunConfig
from vssm.data import DataConfig, SyntheticConfig
from vssm.data.storage import read_object
from vssm.lab.bench import measure
from vssm.lab.bench.measure import Record
from vssm.runs.folder import read_log
from vssm.training.loop import train
from vssm.training.progress import Progress

LENGTH = FEATURES = 28
WARM, WINDOWS = 5, 10
_EPOCH = 45  # steps; a new order of the data is drawn once an epoch


def main_train(
    out: Path | None = None,
    *,
    device: str = "auto",
    kinds: tuple[str, ...] = KINDS,
    levels: tuple[int, ...] = (),
    batch: int | None = None,
    steps: int | None = None,
    width: int | None = None,
    layers: int | None = None,
) -> Record:
    """Times training.

    Arguments:
        out: Where the JSON goes.
        device: Where to run: auto, cpu or cuda.
        kinds: The models.
        levels: Also time the vssm with this many levels of latents, as vssm_l<L>.
        batch: Sequences in a step.
        steps: Steps that are timed.
        width: Width of the models.
        layers: Depth of every stack.
    """
    command = measure.command_line("vssm bench train", main_train, locals())
    where = measure.open_device(device)
    models = measure.model_options(kinds, levels)
    cuda, paper = where.type == "cuda", PRESETS["paper-mnist"]
    batch = (paper.train.batch if cuda else 32) if batch is None else batch
    steps = (200 if cuda else 10) if steps is None else steps
    measure.check_sizes(batch=batch, steps=steps)
    window = -(-steps // WINDOWS)
    total = window * (WARM + WINDOWS)
    num = -(-batch * _EPOCH * 10 // 9)  # a tenth is for validation
    model = replace(
        paper.model,
        width=width or (paper.model.width if cuda else 128),
        layers=layers or (paper.model.layers if cuda else 2),
    )
    options = replace(
        paper.train,
        device=str(where),
        batch=batch,
        epochs=total,
        max_steps=total,
        log_every=window,
        validate_every=total,
        checkpoint_minutes=1e6,
        samples=0,
    )
    synthetic = SyntheticConfig(length=LENGTH, features=FEATURES, num=num)
    data = DataConfig(name="synthetic", synthetic=synthetic)
    run = RunConfig(data=data, model=model, train=options)
    dtype = torch.bfloat16 if cuda else torch.float32
    config = {
        **{name: getattr(model, name) for name in ("width", "layers", "latents", "classes")},
        "data": f"synthetic rows, {LENGTH} steps of {FEATURES} values",
        "batch": batch,
        "window": window,
        "precision": str(dtype).removeprefix("torch."),
    }
    record = Record("train", command, where, config, out, dtype=dtype)
    for name, own in models.items():
        add_speed(record, name, partial(_speeds, run, own))
    print_train_table(record)
    return record


def add_speed(
    record: Record, name: str, measured: Callable[[], tuple[list[float], int]], peer: bool = False
) -> None:
    """Adds the speed, the size and the peak memory of a training, or notes why there is none."""
    key = f"{name}_tokens_per_second"
    if (made := record.attempt(key, measured, peer)) is None:
        return
    (speeds, parameters), peak = made
    median, low, high = measure.median_and_tails(speeds)
    metrics = {key: median, f"{key}_p10": low, f"{key}_p90": high, f"{name}_parameters": parameters}
    if peak is not None:
        metrics[f"{name}_peak_memory_mib"] = peak
    record.add(metrics)


def _speeds(run: RunConfig, own: dict[str, str | int]) -> tuple[list[float], int]:
    """Trains a model; returns the tokens per second of every window, and the number of weights."""
    run = replace(run, model=replace(run.model, **own))
    with tempfile.TemporaryDirectory() as folder:
        done = train(run, Path(folder) / "run", progress=Progress())
        lines, parameters = read_log(done), read_object(done / "meta.json")["parameters"]
    speeds = [line["tokens_per_second"] for line in lines if line["split"] == "train"]
    return speeds[WARM:], parameters


def print_train_table(record: Record) -> None:
    """Prints a row for each model that was timed."""
    metrics, rows, end = record.metrics, [], "_tokens_per_second"
    for name in [key.removesuffix(end) for key in metrics if key.endswith(end)]:
        names = (end, f"{end}_p10", f"{end}_p90", "_peak_memory_mib", "_parameters")
        values = [metrics.get(name + each) for each in names]
        rows.append([name, *("" if value is None else f"{value:,.0f}" for value in values)])
    width, layers, batch = (record.config[key] for key in ("width", "layers", "batch"))
    title = f"Training, {width} wide, {layers} layers, batch {batch}"
    headings = ["model", "tokens/s", "10 %", "90 %", "peak MiB", "parameters"]
    record.table(title, headings, rows)
