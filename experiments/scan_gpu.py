"""Checks and times the Triton backend of the selective scan on the GPU it runs on.

    PYTHONPATH=. python experiments/scan_gpu.py --out scan.json [--shapes 1024x28 ...] [--no-check]

Accuracy is ‖given - reference‖ / ‖reference‖ with the reference in float64, the worst of y, h and all
gradients, at the full size (d_inner 2048, N 16). The reference runs on 32 of the channels, which do not touch
one another; for dB and dC u, dout and dh are zero in all others. Times are medians of
`triton.testing.do_bench` in bf16 with softplus, bias, skip and gate. The floor counts one exponential per
state and step, 16 a clock and multiprocessor at 1.98 GHz.
"""

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from vssm.ops import scan_triton
from vssm.ops.scan_reference import selective_scan_reference

CHANNELS, STATES = 2048, 16
# Milliseconds forward and backward that were asked for.
TARGETS = {
    "1024x28": (0.6, 2.0),
    "256x32": (0.17, 0.55),
    "64x1024": (1.2, 5.0),
    "8x4096": (0.65, 2.5),
    "1x65536": (1.7, 6.3),
}
NAMES = ("u", "dt", "A", "B", "C", "D", "z", "dt_bias", "h0")
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def arguments(shape: str, dtype: torch.dtype, state: bool) -> tuple[dict, Tensor, Tensor]:
    """Returns arguments as a fresh Mamba block makes them (u and z, B and C are slices), dy and dh."""
    batch, length = map(int, shape.split("x"))
    both = torch.randn(batch, length, 2 * CHANNELS, device="cuda").to(dtype)
    small = torch.randn(batch, length, 64 + 2 * STATES, device="cuda").to(dtype)
    step = torch.exp(torch.empty(CHANNELS, device="cuda").uniform_(-6.9, -2.3))
    values = {
        "u": both[..., :CHANNELS],
        "dt": (0.5 * torch.randn(batch, length, CHANNELS, device="cuda")).to(dtype),
        "A": -torch.arange(1.0, STATES + 1, device="cuda").repeat(CHANNELS, 1),
        "B": small[..., 64 : 64 + STATES],
        "C": small[..., 64 + STATES :],
        "D": torch.randn(CHANNELS, device="cuda"),
        "z": both[..., CHANNELS:],
        "dt_bias": step + torch.log(-torch.expm1(-step)),
        "softplus": True,
        "h0": torch.randn(batch, CHANNELS, STATES, device="cuda") if state else None,
    }
    dy = torch.randn(batch, length, CHANNELS, device="cuda").to(dtype)
    return values, dy, torch.randn(batch, CHANNELS, STATES, device="cuda")


def run(values: dict, dy: Tensor, dh: Tensor) -> dict[str, Tensor]:
    """Returns y, h and the gradients by name."""
    y, h = scan_triton.forward(**values)
    return {"y": y, "h": h, **dict(zip(NAMES, scan_triton.backward(dy, dh, **values), strict=True))}


def pick(tensors: dict[str, Tensor], some: Tensor) -> dict[str, Tensor]:
    """Returns the tensors with only the channels in some."""
    where = {"y": 2, "u": 2, "dt": 2, "z": 2, "h": 1, "h0": 1, "A": 0, "D": 0, "dt_bias": 0}
    return {name: t.index_select(where[name], some) if name in where else t for name, t in tensors.items()}


def check(shape: str, dtype: torch.dtype) -> tuple[float, str]:
    """Returns the worst error and where it is; fails if a second run gives other bits."""
    some = torch.arange(5, CHANNELS, CHANNELS // 32, device="cuda")
    values, dy, dh = arguments(shape, dtype, state=True)
    given, again = run(values, dy, dh), run(values, dy, dh)
    assert all(torch.equal(given[name], again[name]) for name in given), "a second run gave other bits"
    leaves = pick({name: values[name].double() for name in NAMES}, some)
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    y, h = selective_scan_reference(*(leaves[name] for name in NAMES[:8]), True, leaves["h0"])
    total = (y * dy[..., some].double()).sum() + (h * dh[:, some].double()).sum()
    wanted = {
        "y": y.detach(),
        "h": h.detach(),
        **dict(zip(NAMES, torch.autograd.grad(total, list(leaves.values())), strict=True)),
    }
    others = torch.ones(CHANNELS, dtype=torch.bool, device="cuda").index_fill(0, some, False)
    for tensor in (values["u"], dy):
        tensor.masked_fill_(others, 0)
    alone = run(values, dy, dh.masked_fill(others[:, None], 0))
    given = pick({**given, "B": alone["B"], "C": alone["C"]}, some)
    errors = {name: float((given[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted}
    worst = max(errors, key=lambda name: errors[name] if errors[name] >= 0 else float("inf"))
    return errors[worst], worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the numbers as JSON")
    parser.add_argument("--shapes", nargs="+", default=list(TARGETS), metavar="BxT")
    parser.add_argument("--no-check", action="store_true", help="time only")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.warm:
        shape, dtype, state = options.warm.split(",")
        run(*arguments(shape, getattr(torch, dtype), bool(state)))
        torch.cuda.synchronize()
        return
    # Compiling takes seconds a kernel: every case in a process of its own, into Triton's cache.
    cases = [",bfloat16,"] + ([] if options.no_check else [",bfloat16,h0", ",float32,h0"])
    commands = [
        [sys.executable, __file__, "--warm", shape + case] for shape in options.shapes for case in cases
    ]
    processes = [subprocess.Popen(command) for command in commands]
    assert sum(process.wait() for process in processes) == 0, "a kernel failed"
    device = torch.cuda.get_device_properties(0)
    metrics, lines = {}, []
    for shape in options.shapes:
        batch, length = map(int, shape.split("x"))
        key = f"b{batch}_t{length}"
        floor = batch * length * CHANNELS * STATES / (16 * device.multi_processor_count * 1.98e6)
        metrics[f"floor_ms_{key}"] = floor
        values, dy, dh = arguments(shape, torch.bfloat16, state=False)
        line = f"{shape:>9}"
        for name, function, target in zip(
            ("fwd", "bwd"),
            (partial(scan_triton.forward, **values), partial(scan_triton.backward, dy, dh, **values)),
            TARGETS.get(shape, (float("nan"), float("nan"))),
            strict=True,
        ):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            milliseconds = triton.testing.do_bench(function, return_mode="median")
            metrics[f"{name}_ms_{key}"] = milliseconds
            metrics[f"{name}_mib_{key}"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            line += f" {milliseconds:8.3f} {target:7.2f}"
        line += f" {floor:7.3f}"
        for dtype in () if options.no_check else LIMITS:
            error, worst = check(shape, dtype)
            metrics[f"error_{str(dtype).removeprefix('torch.')}_{key}"] = error
            line += f"  {error:.1e} ({worst}{'' if error < LIMITS[dtype] else ', TOO LARGE'})"
        print(line, flush=True)
        lines.append(line)
    if options.out:
        result = {
            "name": "scan",
            "machine": device.name,
            "command": " ".join(sys.argv),
            "config": {"channels": CHANNELS, "states": STATES, "dtype": "bfloat16", "backend": "triton"},
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "metrics": metrics,
        }
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    print("\n    B x T   fwd ms  target   bwd ms  target   floor  error float32, bfloat16")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
