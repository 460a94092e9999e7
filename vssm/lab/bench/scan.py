"""The selective scan, u of shape (B, T, D) and N states, beside its peers and its floor.

On a CPU, in float32, without gate and softplus because one peer has neither:

| name        | what runs                                                                            |
| ----------- | ------------------------------------------------------------------------------------ |
| (none)      | `selective_scan` with the backend that "auto" chooses                                |
| `reference` | the same with backend="reference", a loop over time                                  |
| `mambapy`   | mambapy's parallel scan and the work its `MambaBlock.selective_scan` does around it  |
| `floor`     | no scan of this accuracy can be faster on this machine, see `floor_ms`               |

Every repeat runs each of them once, one after the other, so that a disturbance meets all of them. It times a
forward pass that records a graph, then the backward pass through that graph. Numbers are medians in
milliseconds; `fwd_p10_ms_...` and `fwd_p90_ms_...` are the 10 % and 90 % quantiles. On CUDA see `scan_cuda`.
"""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vssm.lab.bench.plot import check_plot, plot_result
from vssm.lab.bench.record import Record, number, table, typed
from vssm.lab.bench.scan_peers import absence, peer_scan
from vssm.lab.bench.timing import best_ms, check_whole, open_device, spread
from vssm.ops import choose_backend, selective_scan

__all__ = ["CUDA_SHAPES", "SHAPES", "Shape", "bench_scan", "floor_ms", "main_scan"]


class Shape(NamedTuple):
    """One problem: B sequences of T steps with D channels of N states."""

    batch: int
    length: int
    channels: int
    states: int

    @property
    def name(self) -> str:
        return f"b{self.batch}_t{self.length}"


SHAPES = (
    Shape(16, 256, 512, 16),
    Shape(1, 2048, 256, 16),
    Shape(64, 28, 2048, 16),
    Shape(1, 1, 512, 16),
)
CUDA_SHAPES = tuple(
    Shape(*size, 2048, 16) for size in ((1024, 28), (256, 32), (64, 1024), (8, 4096), (1, 65536))
)
# Multiply-adds that an element of h needs: 9 for exp with a relative error of 4e-7, 4 for h and y.
OPERATIONS = 13
_CPU = torch.device("cpu")


def main_scan(
    out: str | Path | None = None,
    *,
    device: str = "auto",
    shapes: Sequence[str | Shape] | None = None,
    repeats: int = 20,
    check: bool = False,
    peers: bool = True,
    plot: str | Path | None = None,
    restart: bool = False,
) -> dict[str, Any]:
    """Times the scan, prints a table and writes the result as JSON if `out` says where.

    Arguments:
        out: The JSON file, written after every shape; a run that was stopped goes on from it.
        device: "auto", "cpu", "cuda" or "cuda:N".
        shapes: Problems as `Shape`, "BxT" or "BxTxDxN"; D and N are 2048 and 16 if not given.
        repeats: How often ours runs on a CPU; on CUDA it runs for a tenth of a second.
        check: On CUDA, whether to measure errors against float64 and to compare the bits of two runs.
        peers: Whether to time the peers that are installed.
        plot: Where a picture goes, .png or .svg.
        restart: Whether to forget what `out` holds.
    """
    command = typed("scan", main_scan, locals())
    where = open_device(device)
    check_plot(plot)
    check_whole("repeats", repeats)
    cuda = where.type == "cuda"
    if check and not cuda:
        raise ValueError("check=True is for CUDA, the CPU kernels have tests; allowed: check=False")
    chosen = [_parse(shape) for shape in shapes or (CUDA_SHAPES if cuda else SHAPES)]
    config = {"dtype": "bfloat16" if cuda else "float32", "repeats": "0.1 s" if cuda else repeats}
    dtype = getattr(torch, config["dtype"])
    record = Record("scan", command, where, config, out, restart, dtype)
    record.config["shapes"] = [shape._asdict() for shape in chosen]
    if cuda:
        choose_backend("triton", where, dtype)
        from vssm.lab.bench.scan_cuda import bench_scan_cuda, headings_and_rows

        bench_scan_cuda(record, chosen, where, check, peers)
        headings, rows = headings_and_rows(record, chosen)
    else:
        backends = None if peers else ("auto",)
        if peers and (reason := absence("mambapy")):
            record.note("mambapy_ms", reason)
        for shape in chosen:
            if f"floor_ms_{shape.name}" not in record.metrics:
                record.add(bench_scan([shape], repeats, backends))
        headings, rows = _headings_and_rows(record, chosen)
    table(f"Selective scan in ms, {record.config['dtype']}", headings, rows)
    made = record.made()
    if plot is not None:
        plot_result(made, plot)
    return made


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
    installed = ["auto", "reference", *([] if absence("mambapy") else ["mambapy"])]
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
            median, low, high = spread(taken)
            metrics[f"{what}_ms_{shape.name}"] = median
            if what in ("fwd", "bwd") and len(taken) > 1:
                metrics[f"{what}_p10_ms_{shape.name}"] = low
                metrics[f"{what}_p90_ms_{shape.name}"] = high
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
    copying = best_ms(lambda: target.copy_(source), _CPU)
    matrix = torch.ones(1024, 1024)
    per_ms = 1024**3 / best_ms(lambda: matrix @ matrix, _CPU)
    return max(copying, batch * length * channels * states * OPERATIONS / per_ms)


def _parse(shape: str | Shape) -> Shape:
    if isinstance(shape, Shape):
        return shape
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(x[1-9]\d*x[1-9]\d*)?", shape):
        raise ValueError(
            f"shapes={shape!r} is not allowed; allowed: BxT or BxTxDxN, whole numbers >= 1"
        )
    sizes = [int(size) for size in shape.split("x")]
    return Shape(*sizes, *((2048, 16) if len(sizes) == 2 else ()))


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
            y = peer_scan("mambapy", u, dt, A, B, C, D)
        else:
            y, _ = selective_scan(u, dt, A, B, C, D, backend=backend)
    between = time.perf_counter()
    times = {"fwd": 1e3 * (between - start) / calls}
    if train:
        torch.autograd.grad(y, list(leaves.values()), slope)
        times["bwd"] = 1e3 * (time.perf_counter() - between)
    return times


def _headings_and_rows(
    record: Record, shapes: Sequence[Shape]
) -> tuple[list[str], list[list[str]]]:
    """The metrics of the CPU, with how many times faster ours is than each peer."""
    metrics = record.metrics
    peers = [
        peer for peer in ("reference", "mambapy") if any(name.startswith(peer) for name in metrics)
    ]
    rows = []
    for shape in shapes:
        for what in ("fwd", "bwd"):
            ours = metrics.get(f"{what}_ms_{shape.name}")
            if ours is None:
                continue
            low, high = (metrics.get(f"{what}_{part}_ms_{shape.name}") for part in ("p10", "p90"))
            theirs = [metrics.get(f"{peer}_{what}_ms_{shape.name}") for peer in peers]
            rows.append(
                [
                    ", ".join(map(str, shape)) if what == "fwd" else "",
                    what,
                    number(metrics[f"floor_ms_{shape.name}"]) if what == "fwd" else "",
                    f"{number(ours)}, {number(low)}–{number(high)}",
                    *(
                        "" if peer is None else f"{number(peer)} ({peer / ours:.0f}x)"
                        for peer in theirs
                    ),
                ]
            )
    return ["B, T, D, N", "", "floor", f"{record.config['backend']}, 10–90 %", *peers], rows
