"""The selective scan, u of shape (B, T, D) and N states, beside its peers and its floor.

| metric                         | what                                                        |
| ------------------------------ | ----------------------------------------------------------- |
| `fwd_ms`                       | a forward pass; ours records a graph, those of peers do not |
| `bwd_ms`                       | the backward pass through a graph                           |
| `fwd_p10_ms`, `fwd_p90_ms`     | the 10 % and 90 % quantiles                                 |
| `fwd_mib`, `bwd_mib`           | peak memory beyond the arguments (CUDA)                     |
| `reference_...`, `mambapy_...` | the same for our loop over time (CPU) and for the peers     |
| `floor_ms`, `floor_bwd_ms`     | a lower bound for this machine, see `floor_ms`              |
| `error_float32`, `_bfloat16`   | the worst relative error of y, h and all gradients          |
| `same_bits`                    | 1 when a second run gave the same bits, else 0              |

On CUDA: bfloat16 with softplus, bias, skip and gate, timed by events. On a CPU: float32 without
gate and softplus, because mambapy has neither. A single step is timed without a graph.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vssm.lab.bench.floor import copy_bytes_per_ms
from vssm.lab.bench.peers import SCANS, missing, peer_scan
from vssm.lab.bench.record import Record, failure, number
from vssm.lab.bench.timing import check_whole, kernel, open_device, spread
from vssm.ops import choose_backend, selective_scan

__all__ = ["Shape", "floor_ms", "main_scan", "scan_arguments", "scan_errors"]


class Shape(NamedTuple):
    """One problem: B sequences of T steps with D channels of N states."""

    batch: int
    length: int
    channels: int
    states: int

    @property
    def name(self) -> str:
        return f"b{self.batch}_t{self.length}"


SHAPES = {
    "cpu": ("16x256x512x16", "1x2048x256x16", "64x28x2048x16", "1x1x512x16"),
    "cuda": ("1024x28", "256x32", "64x1024", "8x4096", "1x65536"),
}
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
_GRADIENTS = ("u", "dt", "A", "B", "C", "D", "z", "dt_bias", "h0")
_OPERATIONS = 13  # multiply-adds per element of h: 9 for an exp with error 4e-7, 4 for h and y
_EXPONENTIALS = 16 * 1.98e6  # per multiprocessor and millisecond, at 1.98 GHz
_FEW_STEPS = 64  # with more, some peers take minutes: see `_too_slow`

Scan = Callable[..., Any]


def main_scan(
    out: str | Path | None = None,
    *,
    device: str = "auto",
    shapes: Sequence[str] | None = None,
    repeats: int = 20,
    check: bool = False,
    peers: bool = True,
    plot: str | Path | None = None,
    restart: bool = False,
) -> dict[str, Any]:
    """Times the scan; `vssm bench --help` describes the options."""
    options = locals()
    where = open_device(device)
    check_whole(repeats=repeats)
    cuda = where.type == "cuda"
    if check and not cuda:
        raise ValueError("check=True needs CUDA; the kernels of the CPU are checked by the tests")
    chosen = [_parse(shape) for shape in shapes or SHAPES[where.type]]
    config = {"dtype": "bfloat16" if cuda else "float32", "repeats": "0.1 s" if cuda else repeats}
    dtype = getattr(torch, config["dtype"])
    if cuda:
        choose_backend("triton", where, dtype)  # raises where Triton is missing
    record = Record(main_scan, options, where, config, dtype)
    record.config["shapes"] = [shape._asdict() for shape in chosen]
    scans: dict[str, Scan] = {"": partial(_ours, "auto")}
    if peers:
        scans |= {} if cuda else {"reference": partial(_ours, "reference")}
        for peer in SCANS if cuda else ("mambapy",):
            if reason := missing(peer):
                record.note(f"{peer}_ms", reason)
            else:
                scans[peer] = _peer(peer)
    rate = copy_bytes_per_ms(where) if cuda else 0.0
    for shape in chosen:
        values = scan_arguments(shape, dtype, where, full=cuda)
        for name, scan in scans.items():
            if not (name == "mambapy" and shape.length == 1):
                _time(record, name, scan, shape, values, (100, 200) if cuda else (2000, repeats))
        if f"floor_ms_{shape.name}" not in record.metrics:
            record.add({f"floor_ms_{shape.name}": floor_ms(shape, where, rate, False)})
            if cuda:
                floor = floor_ms(shape, where, rate, True)
                record.add({f"floor_bwd_ms_{shape.name}": floor, "copy_gb_per_second": rate / 1e6})
    for shape in chosen if check else ():
        if f"same_bits_{shape.name}" not in record.metrics:
            _check(record, shape)
    headings, rows = _table(record, chosen)
    return record.finish(f"Selective scan in ms, {config['dtype']}", headings, rows)


def floor_ms(shape: Shape, device: torch.device, bytes_per_ms: float, backward: bool) -> float:
    """Returns a lower bound in milliseconds: the larger of moving data and of computing.

    On CUDA: reading and writing every operand once at the speed of a copy, and one exponential
    per state and step. On a CPU: copying as many bytes as the operands have, and the multiply-adds
    at the rate of PyTorch's matrix product.
    """
    batch, length, channels, states = shape
    elements = batch * length * channels * states
    if device.type == "cuda":
        # Forward moves u, dt, z and y. Backward reads u, dt, z and dy and writes three gradients.
        # B and C, and their gradients, count as well; the rest is small.
        operands, small = (7, 4) if backward else (4, 2)
        traffic = 2 * batch * length * (operands * channels + small * states)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        return max(traffic / bytes_per_ms, elements / (processors * _EXPONENTIALS))
    numbers = batch * length * (3 * channels + 2 * states) + channels * states * (1 + batch)
    source, target = torch.ones(numbers // 2), torch.empty(numbers // 2)
    matrix = torch.ones(1024, 1024)
    per_ms = 1024**3 / min(kernel(lambda: matrix @ matrix, device))
    return max(min(kernel(lambda: target.copy_(source), device)), elements * _OPERATIONS / per_ms)


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


def scan_errors(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    scan: Scan = selective_scan,
) -> tuple[float, str, bool]:
    """Compares a scan with the loop over time in float64.

    The loop runs on 32 of the channels, which do not touch one another. For the gradients of B and
    C, which sum over channels, u, dy and dh are zero in all other channels.

    Returns:
        The worst error, where it is, and whether a second run gave the same bits.
    """
    batch, length, channels, states = shape
    some = torch.arange(min(5, channels - 1), channels, max(1, channels // 32), device=device)
    values = scan_arguments(shape, dtype, device)
    values["h0"] = torch.randn(batch, channels, states, device=device)
    dy = torch.randn(batch, length, channels, device=device).to(dtype)
    dh = torch.randn(batch, channels, states, device=device)

    given, again = _outputs(scan, values, dy, dh), _outputs(scan, values, dy, dh)
    same = all(torch.equal(given[name], again[name]) for name in given)
    picked = _pick({name: values[name].double() for name in _GRADIENTS}, some)
    loop = partial(selective_scan, backend="reference")
    wanted = _outputs(
        loop, {**picked, "softplus": True}, dy[..., some].double(), dh[:, some].double()
    )
    others = torch.ones(channels, dtype=torch.bool, device=device).index_fill(0, some, False)
    values["u"] = values["u"].masked_fill(others, 0)
    alone = _outputs(scan, values, dy.masked_fill(others, 0), dh.masked_fill(others[:, None], 0))
    given = _pick({**given, "dB": alone["dB"], "dC": alone["dC"]}, some)
    errors = {
        name: float((given[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted
    }
    worst = max(errors, key=lambda name: errors[name] if errors[name] >= 0 else float("inf"))
    return errors[worst], worst, same


def _parse(shape: str) -> Shape:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(x[1-9]\d*x[1-9]\d*)?", shape):
        raise ValueError(
            f"shapes={shape!r} is not allowed; allowed: BxT or BxTxDxN, whole numbers >= 1"
        )
    sizes = [int(size) for size in shape.split("x")]
    return Shape(*sizes, *((2048, 16) if len(sizes) == 2 else ()))


def _ours(backend: str, **values: Any) -> Tensor:  # noqa: ANN401
    return selective_scan(**values, backend=backend)[0]


def _peer(peer: str) -> Scan:
    def scan(**values: Any) -> Tensor:  # noqa: ANN401
        return peer_scan(peer, **values)

    return torch.compile(scan, dynamic=False) if peer == "associative_scan" else scan


def _time(
    record: Record,
    name: str,
    scan: Scan,
    shape: Shape,
    values: dict[str, Any],
    budget: tuple[int, int],
) -> None:
    """Times both passes of an implementation, or notes why it can not.

    The budget is the total milliseconds of all calls, and the largest number of calls.
    """
    device, prefix = record.device, f"{name}_" if name else ""
    train = shape.length > 1
    flags = {key: value for key, value in values.items() if key not in _GRADIENTS}
    for way in ("fwd", "bwd") if train else ("fwd",):
        metric = f"{prefix}{way}_ms_{shape.name}"
        if metric in record.metrics:
            continue
        if reason := _too_slow(name, shape, way == "bwd"):
            record.note(metric, reason)
            continue
        graph = train and (way == "bwd" or name not in SCANS)
        inputs = {
            key: v.detach().requires_grad_(graph) for key, v in values.items() if key not in flags
        }
        try:
            call = partial(scan, **inputs, **flags)
            if way == "bwd":
                y = call()
                arguments = (y, list(inputs.values()), torch.ones_like(y))
                call = partial(torch.autograd.grad, *arguments, retain_graph=True)
            median, low, high = spread(kernel(call, device, *budget))
            metrics: dict[str, float | None] = {
                metric: median,
                f"{prefix}{way}_p10_ms_{shape.name}": low,
                f"{prefix}{way}_p90_ms_{shape.name}": high,
            }
            if device.type == "cuda":
                metrics[f"{prefix}{way}_mib_{shape.name}"] = _peak_mib(call, device)
            record.add(metrics)
        except Exception as error:
            if not name:
                raise
            record.note(metric, failure(error))  # prototypes fail in ways of their own
            return
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _too_slow(peer: str, shape: Shape, backward: bool) -> str | None:
    """Says why a peer is not run.

    Backward through transformers' loop fills a tensor of all steps for every step. Backward of
    associative_scan did not end within seven minutes at 4,096 steps on an H200 (torch 2.11).
    """
    slow = peer == "transformers" or (peer == "associative_scan" and backward)
    if slow and shape.length > _FEW_STEPS:
        return f"not run: {shape.length} steps would take minutes; at most {_FEW_STEPS} are run"
    elements = shape.batch * shape.length * shape.channels * shape.states
    if peer == "associative_scan" and elements >= 2**31:
        return f"not run: {elements} elements need 64-bit addresses in its generated code"
    return None


def _check(record: Record, shape: Shape) -> None:
    metrics: dict[str, float | None] = {}
    same = True
    for dtype, limit in LIMITS.items():
        error, worst, equal = scan_errors(shape, dtype, record.device)
        name = f"error_{str(dtype).removeprefix('torch.')}_{shape.name}"
        if not error < limit:
            record.note(name, f"{error:.1e} in {worst} is too large; the limit is {limit:g}")
        metrics[name], same = error, same and equal
    record.add({**metrics, f"same_bits_{shape.name}": float(same)})


def _outputs(scan: Scan, values: dict[str, Any], dy: Tensor, dh: Tensor) -> dict[str, Tensor]:
    """Returns y, h and the gradients of all inputs."""
    leaves = {name: values[name].detach().requires_grad_() for name in _GRADIENTS}
    y, h = scan(**leaves, softplus=values["softplus"])
    gradients = torch.autograd.grad((y, h), list(leaves.values()), (dy, dh))
    named = {f"d{name}": value for name, value in zip(_GRADIENTS, gradients, strict=True)}
    return {"y": y.detach(), "h": h.detach(), **named}


def _pick(tensors: dict[str, Tensor], some: Tensor) -> dict[str, Tensor]:
    """Returns the tensors with only some of the channels; gradients are called as d and a name."""
    dims = {"y": 2, "u": 2, "dt": 2, "z": 2, "h": 1, "h0": 1, "A": 0, "D": 0, "dt_bias": 0}
    dims |= {f"d{name}": dim for name, dim in dims.items()}
    return {
        name: tensor.index_select(dims[name], some) if name in dims else tensor
        for name, tensor in tensors.items()
    }


def _peak_mib(call: Callable[[], object], device: torch.device) -> float:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _table(record: Record, shapes: Sequence[Shape]) -> tuple[list[str], list[list[str]]]:
    """Makes the table, with how many times faster ours is than each peer."""
    metrics, rows = record.metrics, []
    peers = [
        peer
        for peer in ("reference", *SCANS)
        if any(name.startswith(f"{peer}_fwd_ms") for name in metrics)
    ]
    checked = any(name.startswith("error_") for name in metrics)
    for shape in shapes:
        for way, floor in (("fwd", "floor_ms"), ("bwd", "floor_bwd_ms")):
            ours = metrics.get(f"{way}_ms_{shape.name}")
            if ours is None:
                continue
            low, high = (metrics.get(f"{way}_{part}_ms_{shape.name}") for part in ("p10", "p90"))
            theirs = [metrics.get(f"{peer}_{way}_ms_{shape.name}") for peer in peers]
            errors = [
                metrics.get(f"error_{dtype}_{shape.name}") for dtype in ("float32", "bfloat16")
            ]
            told = ", ".join(f"{error:.0e}" for error in errors if error and way == "fwd")
            rows.append(
                [
                    ", ".join(map(str, shape)) if way == "fwd" else "",
                    way,
                    number(metrics.get(f"{floor}_{shape.name}")),
                    f"{number(ours)}, {number(low)}–{number(high)}",
                    *([told] if checked else []),
                    *(f"{number(t)} ({t / ours:.0f}x)" if t else "" for t in theirs),
                ]
            )
    backend = f"{record.config['backend']}, 10–90 %"
    errors = ["error float32, bf16"] if checked else []
    return ["B, T, D, N", "", "floor", backend, *errors, *peers], rows
