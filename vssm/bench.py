"""How fast the kernels are, side by side with the peers that are installed.

The scan, for u of shape (B, T, D) and N states, without gate and softplus because one peer has neither:

| name        | what runs                                                                            |
| ----------- | ------------------------------------------------------------------------------------ |
| (none)      | `selective_scan` with the backend that "auto" chooses                                |
| `reference` | the same with backend="reference", a loop over time                                  |
| `mambapy`   | mambapy's parallel scan and the work its `MambaBlock.selective_scan` does around it  |
| `floor`     | no scan of this accuracy can be faster on this machine, see `floor_ms`               |

Every repeat runs each of them once, one after the other, so that a disturbance meets all of them. It times a
forward pass that records a graph, then the backward pass through that graph. Numbers are medians in
milliseconds; `fwd_p10_ms_...` and `fwd_p90_ms_...` are the 10 % and 90 % quantiles.

Generation, of fresh models, since time does not depend on what was learned:

| name                   | what runs                                                                 |
| ---------------------- | ------------------------------------------------------------------------- |
| `<kind>_ms_...`          | T steps from nothing; one shot for vssm and tvae, with caches for the others |
| `<kind>_prompted_ms_...` | the second half of T steps after the first                                |
| `<kind>_chunk<W>_ms_...` | T steps in four chunks (vssm and tvae)                                    |
"""

import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vssm.config import KINDS, ModelConfig
from vssm.generate import generate
from vssm.models import build
from vssm.ops import choose_backend, selective_scan
from vssm.results import result, write_result

__all__ = ["bench_generate", "bench_scan", "floor_ms", "main_generate", "main_scan"]


class Shape(NamedTuple):
    """One problem: B sequences of T steps with D channels of N states."""

    batch: int
    length: int
    channels: int
    states: int

    @property
    def name(self) -> str:
        return f"b{self.batch}_t{self.length}"


SHAPES = (Shape(16, 256, 512, 16), Shape(1, 2048, 256, 16), Shape(64, 28, 2048, 16), Shape(1, 1, 512, 16))
# Multiply-adds that an element of h needs: 9 for exp with a relative error of 4e-7, 4 for h and y.
OPERATIONS = 13


def bench_scan(
    shapes: Sequence[Shape] = SHAPES, repeats: int = 20, backends: Sequence[str] | None = None
) -> dict[str, float]:
    """Times the selective scan and its peers on the CPU.

    Arguments:
        shapes: The problems; a single step is timed without a graph, as one of a hundred in a loop.
        repeats: How often ours runs; the others, which are slow, run a tenth of that and at least twice.
        backends: Some of "auto", "reference" and "mambapy"; all that are installed if not given.

    Returns:
        Milliseconds by name, for example `fwd_ms_b16_t256`, `mambapy_bwd_ms_b16_t256`, `floor_ms_b16_t256`.
    """
    installed = ["auto", "reference", *(["mambapy"] if importlib.util.find_spec("mambapy") else [])]
    for backend in backends or ():
        if backend not in installed:
            raise ValueError(
                f"backend={backend!r} can not be timed; allowed: {', '.join(map(repr, installed))}"
            )
    metrics = {}
    for shape in shapes:
        inputs = _inputs(shape)
        times: dict[str, list[float]] = {}
        for repeat in range(-1, repeats):  # the first run of each is not counted
            for backend in backends or installed:
                if backend == "mambapy" and shape.length == 1:
                    continue
                if backend != "auto" and repeat >= max(2, repeats // 10):
                    continue
                for what, taken in _run(backend, inputs, shape.length > 1).items():
                    prefix = "" if backend == "auto" else f"{backend}_"
                    times.setdefault(f"{prefix}{what}", []).extend([taken] if repeat >= 0 else [])
        for what, taken in times.items():
            metrics[f"{what}_ms_{shape.name}"] = statistics.median(taken)
            if what in ("fwd", "bwd") and len(taken) > 1:
                deciles = statistics.quantiles(taken, n=10, method="inclusive")
                metrics[f"{what}_p10_ms_{shape.name}"] = deciles[0]
                metrics[f"{what}_p90_ms_{shape.name}"] = deciles[-1]
        metrics[f"floor_ms_{shape.name}"] = floor_ms(shape)
    return metrics


def floor_ms(shape: Shape) -> float:
    """Returns a lower bound in milliseconds for the forward pass, from two measurements made here and now.

    The larger of two times: that of copying as many bytes as the scan must read and write at least once (u,
    dt, B, C, A, y and h), and that of its multiply-adds at the rate of PyTorch's matrix product.
    """
    batch, length, channels, states = shape
    numbers = batch * length * (3 * channels + 2 * states) + channels * states * (1 + batch)
    source, target = torch.ones(numbers // 2), torch.empty(numbers // 2)
    copying = _best_ms(lambda: target.copy_(source))
    matrix = torch.ones(1024, 1024)
    per_ms = 1024**3 / _best_ms(lambda: matrix @ matrix)
    return max(copying, batch * length * channels * states * OPERATIONS / per_ms)


def main_scan(out: Path | None = None, shapes: Sequence[Shape] = SHAPES, repeats: int = 20) -> dict[str, Any]:
    """Times the scan, prints a table and writes the result as JSON if `out` says where."""
    metrics = bench_scan(shapes, repeats)
    config = {
        "backend": choose_backend("auto", torch.device("cpu"), torch.float32),
        "threads": torch.get_num_threads(),
        "repeats": repeats,
        "shapes": [shape._asdict() for shape in shapes],
    }
    made = result("scan", "vssm bench scan", config, metrics)
    console = Console()
    console.width = max(console.width, 100)  # a narrow terminal wraps lines rather than losing numbers
    console.print(_table(made))
    if out is not None:
        write_result(out, made)
    return made


def bench_generate(
    kinds: Sequence[str] = KINDS,
    batches: Sequence[int] = (1, 16),
    lengths: Sequence[int] = (28, 256),
    width: int = 256,
    layers: int = 4,
    repeats: int = 5,
) -> dict[str, float]:
    """Times generation on the CPU: medians in milliseconds for a whole batch, after one warm-up.

    Arguments:
        kinds: The models.
        batches: Numbers of sequences.
        lengths: Numbers of steps, T.
        width: Width of the models.
        layers: Depth of every stack.
        repeats: How often each call runs; all kinds take turns within a repeat.
    """
    models = {kind: build(ModelConfig(kind=kind, features=28, width=width, layers=layers)) for kind in kinds}
    metrics = {}
    for batch, length in itertools.product(batches, lengths):
        name, prompt = f"ms_b{batch}_t{length}", torch.rand(batch, length // 2, 28)
        calls: dict[str, Callable[[], object]] = {}
        for kind, model in models.items():
            whole = partial(generate, model, num=batch, length=length)
            calls[f"{kind}_{name}"] = whole
            calls[f"{kind}_prompted_{name}"] = partial(generate, model, length=length // 2, prompt=prompt)
            if kind in ("vssm", "tvae"):
                calls[f"{kind}_chunk{length // 4}_{name}"] = partial(whole, chunk=length // 4)
        times: dict[str, list[float]] = {call: [] for call in calls}
        for repeat in range(-1, repeats):
            for call, function in calls.items():
                start = time.perf_counter()
                function()
                if repeat >= 0:
                    times[call].append(1e3 * (time.perf_counter() - start))
        metrics |= {call: statistics.median(taken) for call, taken in times.items()}
    return metrics


def main_generate(out: Path | None = None, **options: Any) -> dict[str, Any]:  # noqa: ANN401
    """Times generation, prints a table and writes the result as JSON if `out` says where."""
    metrics = bench_generate(**options)
    config = {"width": 256, "layers": 4, "features": 28, "threads": torch.get_num_threads(), **options}
    made = result("generate", "vssm bench generate", config, metrics)
    title = f"Generation in ms, {made['machine']['cpu']}, {config['threads']} threads"
    table = Table("model", *dict.fromkeys(name.rpartition("ms_")[2] for name in metrics), title=title)
    for row in dict.fromkeys(name.rpartition("_ms_")[0] for name in metrics if "chunk" not in name):
        times = [metrics[f"{row}_ms_{column.header}"] for column in table.columns[1:]]
        table.add_row(row, *map(_number, times))
    Console().print(table)
    if out is not None:
        write_result(out, made)
    return made


def _inputs(shape: Shape) -> dict[str, Tensor]:
    """Inputs like those of a fresh Mamba layer: dt from 0.001 to 0.1, A from -1 to -N."""
    batch, length, channels, states = shape
    generator = torch.Generator().manual_seed(0)
    return {
        "u": torch.randn(batch, length, channels, generator=generator),
        "dt": 10 ** (-3 + 2 * torch.rand(batch, length, channels, generator=generator)),
        "A": -torch.arange(1.0, states + 1).repeat(channels, 1),
        "B": torch.randn(batch, length, states, generator=generator),
        "C": torch.randn(batch, length, states, generator=generator),
        "D": torch.ones(channels),
    }


def _run(backend: str, inputs: dict[str, Tensor], train: bool) -> dict[str, float]:
    """Returns the milliseconds of one forward pass, and of the backward pass when training."""
    leaves = {name: value.detach().requires_grad_(train) for name, value in inputs.items()}
    u, dt, A, B, C, D = leaves.values()
    slope = torch.ones_like(u)
    calls = 1 if train else 100
    start = time.perf_counter()
    for _ in range(calls):
        if backend == "mambapy":
            y = _mambapy_scan(u, dt, A, B, C, D)
        else:
            y, _ = selective_scan(u, dt, A, B, C, D, backend=backend)
    between = time.perf_counter()
    times = {"fwd": 1e3 * (between - start) / calls}
    if train:
        torch.autograd.grad(y, list(leaves.values()), slope)
        times["bwd"] = 1e3 * (time.perf_counter() - between)
    return times


def _mambapy_scan(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """The steps of mambapy's `MambaBlock.selective_scan`."""
    from mambapy.pscan import pscan

    decay = torch.exp(dt.unsqueeze(-1) * A)
    drive = dt.unsqueeze(-1) * B.unsqueeze(2) * u.unsqueeze(-1)
    return (pscan(decay, drive) @ C.unsqueeze(-1)).squeeze(3) + D * u


def _best_ms(function: Callable[[], object], repeats: int = 10) -> float:
    function()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        taken.append(1e3 * (time.perf_counter() - start))
    return min(taken)


def _table(made: dict[str, Any]) -> Table:
    """The metrics of a result, with how many times faster ours is than each peer."""
    metrics, config = made["metrics"], made["config"]
    title = f"Selective scan in ms, {made['machine']['cpu']}, {config['threads']} threads"
    peers = [peer for peer in ("reference", "mambapy") if any(name.startswith(peer) for name in metrics)]
    table = Table(title=title, box=SIMPLE_HEAD)
    for heading in ("B, T, D, N", "", "floor", f"{config['backend']}, 10–90 %", *peers):
        table.add_column(heading, no_wrap=True)
    for fields in config["shapes"]:
        shape = Shape(**fields)
        for what in ("fwd", "bwd"):
            ours = metrics.get(f"{what}_ms_{shape.name}")
            if ours is None:
                continue
            low, high = (_number(metrics[f"{what}_{part}_ms_{shape.name}"]) for part in ("p10", "p90"))
            theirs = [metrics.get(f"{peer}_{what}_ms_{shape.name}") for peer in peers]
            table.add_row(
                ", ".join(map(str, shape)) if what == "fwd" else "",
                what,
                _number(metrics[f"floor_ms_{shape.name}"]) if what == "fwd" else "",
                f"{_number(ours)}, {low}–{high}",
                *("" if peer is None else f"{_number(peer)} ({peer / ours:.0f}x)" for peer in theirs),
            )
    return table


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.2g}"
