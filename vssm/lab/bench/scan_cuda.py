"""The selective scan on CUDA: bfloat16 with softplus, bias, skip and gate, times by events.

| name                           | what                                                                           |
| ------------------------------ | ------------------------------------------------------------------------------ |
| `fwd_ms`, `bwd_ms`             | the Triton kernels as in training, where forward leaves states for backward, in memory that is there before; `p10` and `p90` as on a CPU |
| `fwd_mib`, `bwd_mib`           | most memory while they ran, beyond their arguments                             |
| `floor_ms`, `floor_bwd_ms`     | the larger of one exponential per state and step, 16 a clock and multiprocessor at 1.98 GHz, and of reading and writing every operand once at the speed of a copy measured in the same run |
| `error_float32`, `error_bfloat16` | ‖given - reference‖ / ‖reference‖ with the reference in float64: the worst of y, h and all gradients |
| `same_bits`                    | 1 when a second run gave the same bits everywhere, else 0                      |
| `<peer>_fwd_ms`, ...           | the peers of `scan_peers`, forward without a graph, backward through one       |

The reference runs on 32 of the channels, which do not touch one another; for dB and dC u, dy and dh are zero
in all others. Compiling takes seconds a kernel, so every case is first run in a process of its own, which
fills Triton's cache.
"""

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vssm.lab.bench.floor import copy_bytes_per_ms
from vssm.lab.bench.record import Record, failure, number
from vssm.lab.bench.scan_peers import PEERS, absence, peer_scan
from vssm.lab.bench.timing import kernel, spread
from vssm.ops.scan import selective_scan_reference

if TYPE_CHECKING:
    from vssm.lab.bench.scan import Shape

__all__ = ["bench_scan_cuda", "headings_and_rows"]

# Milliseconds forward and backward that were asked for, on an H200.
TARGETS = {
    "b1024_t28": (0.6, 2.0),
    "b256_t32": (0.17, 0.55),
    "b64_t1024": (1.2, 5.0),
    "b8_t4096": (0.65, 2.5),
    "b1_t65536": (1.7, 6.3),
}
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
NAMES = ("u", "dt", "A", "B", "C", "D", "z", "dt_bias", "h0")
_EXPONENTIALS = 16 * 1.98e6  # a multiprocessor and millisecond
_FEW_STEPS = (
    64  # backward of transformers' loop fills a tensor of all steps for every step, and that of
)
# associative_scan, with 4,096 of them, was not there after seven minutes on an H200 (torch 2.11)
_PEER_SECONDS = 60.0  # for each number of a peer, compilation included
_PEER, _MARK = "peer", "told: "  # of processes that time a peer, and of what they say


def bench_scan_cuda(
    record: Record, shapes: Sequence["Shape"], device: torch.device, check: bool, peers: bool
) -> None:
    """Times the Triton kernels in all shapes, checks them if asked, then times the peers."""
    todo = [shape for shape in shapes if f"fwd_ms_{shape.name}" not in record.metrics]
    unchecked = [
        shape for shape in shapes if check and f"same_bits_{shape.name}" not in record.metrics
    ]
    _compile(
        [(shape, torch.bfloat16, False) for shape in todo]
        + [(shape, dtype, True) for shape in unchecked for dtype in LIMITS]
    )
    bytes_per_ms = copy_bytes_per_ms(device) if todo else 0.0
    for shape in todo:
        record.add({"copy_gb_per_second": bytes_per_ms / 1e6, **_ours(shape, device, bytes_per_ms)})
    for shape in unchecked:
        metrics: dict[str, float] = {}
        for dtype, limit in LIMITS.items():
            error, worst, same = errors(shape, dtype, device)
            name = f"error_{str(dtype).removeprefix('torch.')}_{shape.name}"
            if not error < limit:
                record.note(name, f"{error:.1e} in {worst} is too large; allowed: below {limit:g}")
            metrics |= {name: error}
            metrics[f"same_bits_{shape.name}"] = min(
                float(same), metrics.get(f"same_bits_{shape.name}", 1.0)
            )
        record.add(metrics)
    torch.cuda.empty_cache()  # peers have processes of their own
    for peer in PEERS if peers else ():
        unmeasured = [
            shape for shape in shapes if f"{peer}_fwd_ms_{shape.name}" not in record.metrics
        ]
        if reason := absence(peer):
            for shape in unmeasured:
                record.note(f"{peer}_fwd_ms_{shape.name}", reason)
            continue
        for name, found in _apart(peer, unmeasured, device):
            if isinstance(found, str):
                record.note(name, found)
            else:
                record.add({name: found})


def arguments(
    shape: "Shape", dtype: torch.dtype, state: bool, device: torch.device
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Returns arguments as a fresh Mamba block makes them (u and z, B and C are slices), dy and dh."""
    batch, length, channels, states = shape
    both = torch.randn(batch, length, 2 * channels, device=device).to(dtype)
    small = torch.randn(batch, length, 64 + 2 * states, device=device).to(dtype)
    step = torch.exp(torch.empty(channels, device=device).uniform_(-6.9, -2.3))
    values = {
        "u": both[..., :channels],
        "dt": (0.5 * torch.randn(batch, length, channels, device=device)).to(dtype),
        "A": -torch.arange(1.0, states + 1, device=device).repeat(channels, 1),
        "B": small[..., 64 : 64 + states],
        "C": small[..., 64 + states :],
        "D": torch.randn(channels, device=device),
        "z": both[..., channels:],
        "dt_bias": step + torch.log(-torch.expm1(-step)),
        "softplus": True,
        "h0": torch.randn(batch, channels, states, device=device) if state else None,
    }
    dy = torch.randn(batch, length, channels, device=device).to(dtype)
    return values, dy, torch.randn(batch, channels, states, device=device)


def errors(shape: "Shape", dtype: torch.dtype, device: torch.device) -> tuple[float, str, bool]:
    """Returns the worst error, where it is, and whether a second run gave the same bits."""
    channels = shape.channels
    some = torch.arange(min(5, channels - 1), channels, max(1, channels // 32), device=device)
    values, dy, dh = arguments(shape, dtype, True, device)
    given, again = _run(values, dy, dh), _run(values, dy, dh)
    same = all(torch.equal(given[name], again[name]) for name in given)
    leaves = _pick({name: values[name].double() for name in NAMES}, some)
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    y, h = selective_scan_reference(**leaves, softplus=True)
    total = (y * dy[..., some].double()).sum() + (h * dh[:, some].double()).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()))
    wanted = {"y": y.detach(), "h": h.detach(), **dict(zip(NAMES, gradients, strict=True))}
    others = torch.ones(channels, dtype=torch.bool, device=device).index_fill(0, some, False)
    for tensor in (values["u"], dy):
        tensor.masked_fill_(others, 0)
    alone = _run(values, dy, dh.masked_fill(others[:, None], 0))
    given = _pick({**given, "B": alone["B"], "C": alone["C"]}, some)
    found = {
        name: float((given[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted
    }
    worst = max(found, key=lambda name: found[name] if found[name] >= 0 else float("inf"))
    return found[worst], worst, same


def headings_and_rows(
    record: Record, shapes: Sequence["Shape"]
) -> tuple[list[str], list[list[str]]]:
    """The metrics of CUDA beside the targets, with how many times faster ours is than each peer."""
    metrics, rows = record.metrics, []
    peers = [peer for peer in PEERS if any(name.startswith(f"{peer}_") for name in metrics)]
    for shape in shapes:
        for index, what in enumerate(("fwd", "bwd")):
            ours = metrics[f"{what}_ms_{shape.name}"]
            assert ours is not None
            low, high = (metrics[f"{what}_{part}_ms_{shape.name}"] for part in ("p10", "p90"))
            floor = metrics[f"floor_{'' if what == 'fwd' else 'bwd_'}ms_{shape.name}"]
            found = [
                metrics.get(f"error_{dtype}_{shape.name}") for dtype in ("float32", "bfloat16")
            ]
            told = [f"{error:.0e}" for error in found if error is not None and what == "fwd"]
            theirs = [metrics.get(f"{peer}_{what}_ms_{shape.name}") for peer in peers]
            rows.append(
                [
                    ", ".join(map(str, shape)) if what == "fwd" else "",
                    what,
                    f"{floor:.3f}",
                    f"{TARGETS[shape.name][index]}" if shape.name in TARGETS else "",
                    f"{ours:.3f}, {low:.3f}–{high:.3f}",
                    number(metrics[f"{what}_mib_{shape.name}"]),
                    ", ".join(told),
                    *(
                        "" if peer is None else f"{number(peer)} ({peer / ours:.0f}x)"
                        for peer in theirs
                    ),
                ]
            )
    headings = [
        "B, T, D, N",
        "",
        "floor",
        "target",
        "triton, 10–90 %",
        "MiB",
        "error float32, bf16",
    ]
    return headings + peers, rows


def _ours(shape: "Shape", device: torch.device, bytes_per_ms: float) -> dict[str, float]:
    from vssm.ops.scan import triton as scan_triton

    batch, length, channels, states = shape
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    exponentials = batch * length * channels * states / (processors * _EXPONENTIALS)
    values, dy, dh = arguments(shape, torch.bfloat16, False, device)
    _, _, kept = _forward(values)
    metrics: dict[str, float] = {}
    # Forward moves u, dt, z and y; backward reads the first three and dy, and writes three gradients. B and
    # C, and their gradients, count as well; the rest is small.
    for what, floor, rows, call in (
        ("fwd", "floor_ms", 4, partial(scan_triton.forward, **values, kept=kept)),
        ("bwd", "floor_bwd_ms", 7, partial(scan_triton.backward, dy, dh, **values, kept=kept)),
    ):
        traffic = 2 * batch * length * (rows * channels + 2 * (rows // 3) * states)
        metrics[f"{floor}_{shape.name}"] = max(exponentials, traffic / bytes_per_ms)
        median, low, high = spread(kernel(call, device))
        metrics[f"{what}_ms_{shape.name}"] = median
        metrics[f"{what}_p10_ms_{shape.name}"], metrics[f"{what}_p90_ms_{shape.name}"] = low, high
        metrics[f"{what}_mib_{shape.name}"] = _peak_mib(call, device)
    metrics[f"fwd_mib_{shape.name}"] += 0 if kept is None else kept.nbytes / 2**20
    return metrics


def _peer(peer: str, shape: "Shape", device: torch.device) -> Iterator[tuple[str, float | str]]:
    """Times a peer: names and their milliseconds or MiB, or why there are none."""
    forward, backward = f"{peer}_fwd_ms_{shape.name}", f"{peer}_bwd_ms_{shape.name}"
    elements = shape.batch * shape.length * shape.channels * shape.states
    many = shape.length > _FEW_STEPS
    if peer == "transformers" and many:
        told = f"not run: a loop of {shape.length} steps would take minutes, at most {_FEW_STEPS} are run"
        yield forward, told
        return
    if peer == "associative_scan" and elements >= 2**31:
        yield forward, f"not run: {elements} elements need 64-bit addresses in its generated code"
        return
    name = forward
    try:
        values, dy, _ = arguments(shape, torch.bfloat16, False, device)
        del values["h0"]
        scan = _scan_of(peer)
        with torch.no_grad():
            yield forward, spread(kernel(lambda: scan(**values), device))[0]
            yield f"{peer}_fwd_mib_{shape.name}", _peak_mib(lambda: scan(**values), device)
        name = backward
        if peer == "associative_scan" and many:
            yield (
                name,
                f"not run: {shape.length} steps would take minutes, at most {_FEW_STEPS} are run",
            )
            return
        leaves = {key: values[key].detach().requires_grad_() for key in NAMES[:8]}
        y = scan(**leaves, softplus=True)
        gradients = partial(torch.autograd.grad, y, list(leaves.values()), dy, retain_graph=True)
        yield backward, spread(kernel(gradients, device, most=20))[0]
    except Exception as error:  # prototypes of others fail in ways of their own
        yield name, failure(error)


def _apart(
    peer: str, shapes: Sequence["Shape"], device: torch.device
) -> Iterator[tuple[str, float | str]]:
    """Yields what `_peer` does for all shapes, from a process that is killed where it hangs: not all of them
    end (see `_FEW_STEPS`)."""
    left, known = list(shapes), set()
    while left:
        command = [
            sys.executable,
            "-m",
            "vssm.lab.bench.scan_cuda",
            _PEER,
            peer,
            str(device),
            *map(_sizes, left),
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            while left:
                watchdog = threading.Timer(_PEER_SECONDS, process.kill)
                watchdog.start()
                line = process.stdout.readline()
                late = watchdog.finished.is_set()
                watchdog.cancel()
                if not line:
                    place = left.pop(0).name
                    forward, backward = (f"{peer}_{way}_ms_{place}" for way in ("fwd", "bwd"))
                    why = f"took more than {_PEER_SECONDS:g} s" if late else "ended its process"
                    yield backward if forward in known else forward, f"stopped: {why}"
                    break
                if not line.startswith(_MARK):
                    print(line, end="", flush=True)
                elif told := json.loads(line.removeprefix(_MARK)):
                    known.add(told[0])
                    yield told[0], told[1]
                else:
                    left.pop(0)
        finally:
            process.kill()
            process.communicate()


def _tell_peer(peer: str, device: str, *shapes: str) -> None:
    """Prints what `_peer` yields for each shape, and null after it."""
    for shape in shapes:
        for told in itertools.chain(_peer(peer, _shape(shape), torch.device(device)), [None]):
            print(f"{_MARK}{json.dumps(told)}", flush=True)
        torch.cuda.empty_cache()


def _scan_of(peer: str) -> Callable[..., Tensor]:
    def scan(**values: Any) -> Tensor:  # noqa: ANN401
        return peer_scan(peer, **values)

    return torch.compile(scan, dynamic=False) if peer == "associative_scan" else scan


def _run(values: dict[str, Any], dy: Tensor, dh: Tensor) -> dict[str, Tensor]:
    """Returns y, h and the gradients by name."""
    from vssm.ops.scan import triton as scan_triton

    y, h, kept = _forward(values)
    gradients = scan_triton.backward(dy, dh, **values, kept=kept)
    return {"y": y, "h": h, **dict(zip(NAMES, gradients, strict=True))}


def _forward(values: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns y, h and the states that are kept for backward, if any are, as where a graph is recorded."""
    from vssm.ops.scan import triton as scan_triton

    u, A = values["u"], values["A"]
    batch, length, channels = u.shape
    shape = scan_triton.kept_shape(batch, length, channels, A.shape[1], u.dtype, u.device)
    kept = torch.empty(shape, dtype=torch.float32, device=u.device) if len(shape) > 1 else None
    return *scan_triton.forward(**values, kept=kept), kept


def _pick(tensors: dict[str, Tensor], some: Tensor) -> dict[str, Tensor]:
    """Returns the tensors with only the channels in some."""
    where = {"y": 2, "u": 2, "dt": 2, "z": 2, "h": 1, "h0": 1, "A": 0, "D": 0, "dt_bias": 0}
    return {
        name: t.index_select(where[name], some) if name in where else t
        for name, t in tensors.items()
    }


def _peak_mib(call: Callable[[], object], device: torch.device) -> float:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _compile(cases: Sequence[tuple["Shape", torch.dtype, bool]]) -> None:
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "vssm.lab.bench.scan_cuda",
                _sizes(shape),
                str(dtype),
                str(state),
            ]
        )
        for shape, dtype, state in cases
    ]
    codes = [process.wait() for process in processes]
    assert not any(codes), (
        f"a kernel failed in one of {[case[0].name for case in cases]}, as said above"
    )


def _compile_one(shape: str, dtype: str, state: str) -> None:
    dtypes = {str(known): known for known in LIMITS}
    _run(*arguments(_shape(shape), dtypes[dtype], state == "True", torch.device("cuda")))
    torch.cuda.synchronize()


def _sizes(shape: "Shape") -> str:
    return "x".join(map(str, shape))


def _shape(sizes: str) -> "Shape":
    from vssm.lab.bench.scan import Shape

    return Shape(*map(int, sizes.split("x")))


if __name__ == "__main__":
    if sys.argv[1] == _PEER:
        _tell_peer(*sys.argv[2:])
    else:
        _compile_one(*sys.argv[1:])
