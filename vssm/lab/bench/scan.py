"""The selective scan, u of shape (B, T, D) and N states, beside its floor and our loop over time.

| metric                     | what                                             |
| -------------------------- | ------------------------------------------------ |
| `fwd_ms`                   | a forward pass that records a graph              |
| `bwd_ms`                   | the backward pass through the graph              |
| `fwd_p10_ms`, `fwd_p90_ms` | the 10 % and 90 % quantiles                      |
| `fwd_mib`, `bwd_mib`       | peak memory beyond the arguments (CUDA)          |
| `reference_...`            | the same for our loop over time (CPU)            |
| `floor_ms`, `floor_bwd_ms` | a lower bound for this machine, see `floor_ms`   |

On CUDA: bfloat16 with softplus, bias, skip and gate, timed by events. On a CPU: float32 without
gate and softplus, because mambapy's scan, which experiments/bench_peers.py times beside ours, has
neither. A single step is timed without a graph.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vssm.evaluation.timing import take_times
from vssm.lab.bench.measure import Record, command_line, open_device
from vssm.ops import choose_backend, selective_scan

SHAPES: dict[str, tuple[str, ...]] = {
    "cpu": ("16x256x512x16", "1x2048x256x16", "64x28x2048x16", "1x1x512x16"),
    "cuda": ("1024x28", "256x32", "64x1024", "8x4096", "1x65536"),
}
_OPERATIONS = 13  # multiply-adds per element of h: 9 for an exp with error 4e-7, 4 for h and y
_EXPONENTIALS = 16 * 1.98e6  # per multiprocessor and millisecond, at 1.98 GHz

Scan = Callable[..., Tensor]


class Shape(NamedTuple):
    """One problem: B sequences of T steps with D channels of N states."""

    batch: int
    length: int
    channels: int
    states: int

    @property
    def name(self) -> str:
        return f"b{self.batch}_t{self.length}"


def main_scan(
    out: Path | None = None,
    *,
    device: str = "auto",
    shapes: tuple[str, ...] = (),
    repeats: int | None = None,
) -> Record:
    """Times the selective scan, forward and backward.

    Arguments:
        out: Where the JSON goes.
        device: Where to run: auto, cpu or cuda.
        shapes: Problems as BxT or BxTxDxN.
        repeats: How often each call is timed.
    """
    command = command_line("vssm bench scan", main_scan, locals())
    where = open_device(device)
    cuda = where.type == "cuda"
    chosen = [_parse(shape) for shape in shapes or SHAPES[where.type]]
    dtype = torch.bfloat16 if cuda else torch.float32
    if cuda:
        choose_backend("triton", where, dtype)  # raises where Triton is missing
    shown = [shape._asdict() for shape in chosen]
    config = {"dtype": str(dtype).removeprefix("torch."), "repeats": repeats, "shapes": shown}
    record = Record("scan", command, where, config, out, repeats, dtype=dtype)
    rate = _copy_rate(2**29, where) if cuda else 0.0
    for shape in chosen:
        values = scan_arguments(shape, dtype, where, full=cuda)
        time_scan(record, "", partial(_ours, "auto"), shape, values)
        if not cuda:
            time_scan(record, "reference", partial(_ours, "reference"), shape, values)
        record.add({f"floor_ms_{shape.name}": floor_ms(shape, where, rate)})
        if cuda:
            backward = floor_ms(shape, where, rate, backward=True)
            record.add({f"floor_bwd_ms_{shape.name}": backward})
    record.print_times("Selective scan, ms")
    return record


def floor_ms(shape: Shape, device: torch.device, rate: float, backward: bool = False) -> float:
    """Returns a lower bound in milliseconds: the larger of moving data and of computing.

    On CUDA: reading and writing every operand once at the rate of a copy, in bytes a millisecond,
    and one exponential per state and step. On a CPU: copying as many bytes as the operands have,
    and the multiply-adds at the rate of PyTorch's matrix product.
    """
    batch, length, channels, states = shape
    elements = batch * length * channels * states
    if device.type == "cuda":
        # Forward moves u, dt, z and y. Backward reads u, dt, z and dy and writes three gradients.
        # B and C, and their gradients, count as well; the rest is small.
        operands, small = (7, 4) if backward else (4, 2)
        moved = 2 * batch * length * (operands * channels + small * states)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        return max(moved / rate, elements / (processors * _EXPONENTIALS))
    size = 4 * (batch * length * (3 * channels + 2 * states) + channels * states * (1 + batch))
    matrix = torch.ones(1024, 1024)
    product_ms = min(take_times(lambda: matrix @ matrix, device))
    return max(size / _copy_rate(size // 2, device), elements * _OPERATIONS / 1024**3 * product_ms)


def _copy_rate(size: int, device: torch.device) -> float:
    """Returns the bytes that a copy of so many bytes reads and writes in a millisecond."""
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / min(take_times(lambda: target.copy_(source), device, events=True))


def scan_arguments(
    shape: Shape, dtype: torch.dtype, device: torch.device, full: bool = True
) -> dict[str, Any]:
    """Returns the arguments that a fresh Mamba block gives to the scan.

    Arguments:
        shape: The problem.
        dtype: Of u, dt, B, C and z.
        device: Where they lie.
        full: Whether the scan does softplus, bias and gate as well.
    """
    batch, length, channels, states = shape
    randn = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    both = randn(batch, length, 2 * channels).to(dtype)  # u and z, B and C are slices in a block
    small = randn(batch, length, 64 + 2 * states).to(dtype)
    step = torch.logspace(-3, -1, channels, device=device)
    values = {
        "u": both[..., :channels],
        "dt": (0.5 * randn(batch, length, channels)).to(dtype),
        "A": -torch.arange(1.0, states + 1, device=device).repeat(channels, 1),
        "B": small[..., 64 : 64 + states],
        "C": small[..., 64 + states :],
        "D": randn(channels),
    }
    if not full:
        return values | {"dt": step * torch.exp(values["dt"])}
    bias = step + torch.log(-torch.expm1(-step))
    return values | {"z": both[..., channels:], "dt_bias": bias, "softplus": True}


def _parse(shape: str) -> Shape:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(x[1-9]\d*x[1-9]\d*)?", shape):
        raise ValueError(f"shapes={shape!r} is not allowed; use BxT or BxTxDxN, whole numbers >= 1")
    sizes = [int(size) for size in shape.split("x")]
    return Shape(*sizes, *((2048, 16) if len(sizes) == 2 else ()))


def _ours(backend: str, **values: Any) -> Tensor:  # noqa: ANN401
    return selective_scan(**values, backend=backend)[0]


def time_scan(
    record: Record,
    name: str,
    scan: Scan,
    shape: Shape,
    values: dict[str, Any],
    peer: bool = False,
) -> None:
    """Times the forward pass of a scan and, of more than one step, the backward pass."""
    train = shape.length > 1
    flags = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
    for way in ("fwd", "bwd") if train else ("fwd",):
        graph = train and (way == "bwd" or not peer)
        tensors = {key: value.detach() for key, value in values.items() if key not in flags}
        inputs = {key: value.requires_grad_(graph) for key, value in tensors.items()}
        call = partial(scan, **inputs, **flags)
        if way == "bwd":
            y = call()
            arguments = (y, list(inputs.values()), torch.ones_like(y))
            call = partial(torch.autograd.grad, *arguments, retain_graph=True)
        record.time(f"{name}_{way}_ms_{shape.name}".removeprefix("_"), call, True, peer)
