"""Measures what a call costs the host: the scan, the convolution, a training step, packed rows.

    python experiments/scan_overhead.py --out results/scan_overhead_h200.json

Times are medians in microseconds or milliseconds. The host time of a call is the time until the
call returns; the device is idle when it starts. A training step is timed to the end of all its
work on the device. It draws, scores, walks back and updates the weights, without a CUDA graph.
`asked` is what the project asked for before it was measured.

| metric                                | meaning                                                 |
| ------------------------------------- | ------------------------------------------------------- |
| `scan_us_b1_t28`, ...                 | one `selective_scan` without gradients                  |
| `scan_train_us_b1_t28`, ...           | forward and backward                                    |
| `conv_us_...`, `conv_train_us_...`    | the same of `causal_conv_silu`                          |
| `mamba_ssm_us_...`, `..._train_us_..` | the same of mamba-ssm's scan, where it is installed     |
| `vssm_step_ms_l4`, `_l12`             | a step of a vssm: three stacks of 4, or 12, layers each |
| `ssm_step_ms_l4`                      | a step of an ssm of 4 layers                            |
| `packed_ms`, `padded_ms`              | a step of 4 Mamba blocks on rows of ragged lengths      |
| `packed_speedup`                      | `padded_ms` / `packed_ms`                               |
| `packed_error`                        | relative distance of the gradients of both              |
"""

import importlib.util
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

import vssm
from vssm.nn import MambaBlock, MambaMixer
from vssm.nn.stack import apply_in_halves
from vssm.ops import causal_conv_silu, selective_scan
from vssm.runs.results import result, write_result

SHAPES = ((1, 28), (16, 256), (256, 32))
INNER, STATES, WIDTH = 2048, 16, 256
ASKED = {"scan_us": 40, "scan_train_us": 250, "vssm_step_ms_l4": 15, "ssm_step_ms_l4": 5}
ASKED |= {"packed_speedup": 1.5}
Metrics = dict[str, float]


def median(call: Callable[[], object], device: str, repeats: int, host: bool) -> float:
    """Returns the median seconds of a call: until it returns, or until the device has done it."""
    times = []
    for _ in range(5 + repeats):
        _wait(device)
        start = time.perf_counter()
        call()
        if not host:
            _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[5:])


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def time_calls(device: str, repeats: int) -> Metrics:
    """Times calls of the scan and the convolution, and those of mamba-ssm, of all shapes."""
    metrics: Metrics = {}
    for batch, length in SHAPES:
        for name, (call, leaves) in make_calls(device, batch, length).items():
            where = f"b{batch}_t{length}"
            train = make_training(call, leaves)
            with torch.no_grad():
                metrics[f"{name}_us_{where}"] = 1e6 * median(call, device, repeats, host=True)
            metrics[f"{name}_train_us_{where}"] = 1e6 * median(train, device, repeats, host=True)
    return metrics


def make_calls(device: str, batch: int, length: int) -> dict[str, tuple[Callable, list[Tensor]]]:
    """Returns calls by name, and the tensors whose gradients they have."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device).requires_grad_()

    u, dt, z = (make(batch, length, INNER, dtype=dtype) for _ in range(3))
    B, C = (make(batch, length, STATES, dtype=dtype) for _ in range(2))
    A = (-torch.rand(INNER, STATES, device=device)).requires_grad_()
    D, bias, taps = make(INNER), make(INNER), make(INNER, 4)
    calls: dict[str, tuple[Callable, list[Tensor]]] = {
        "scan": (
            lambda: selective_scan(u, dt, A, B, C, D, z, bias, softplus=True)[0],
            [u, dt, A, B, C, D, z, bias],
        ),
        "conv": (lambda: causal_conv_silu(u, taps, bias)[0], [u, taps, bias]),
    }
    if importlib.util.find_spec("mamba_ssm") is not None and device.startswith("cuda"):
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        turned = [t.detach().mT.contiguous().requires_grad_() for t in (u, dt, B, C, z)]
        tu, tdt, tB, tC, tz = turned
        calls["mamba_ssm"] = (
            lambda: selective_scan_fn(tu, tdt, A, tB, tC, D, tz, bias, delta_softplus=True),
            [*turned, A, D, bias],
        )
    return calls


def make_training(call: Callable, leaves: list[Tensor]) -> Callable:
    """Returns a call that runs another forward and backward."""
    slope = torch.ones_like(call())
    return lambda: torch.autograd.grad(call(), leaves, slope)


def time_steps(device: str, repeats: int) -> Metrics:
    """Times eager training steps of models, of 16 sequences of 28 steps."""
    metrics: Metrics = {}
    x = torch.rand(16, 28, 28, device=device)
    for kind, layers in (("ssm", 4), ("vssm", 4), ("vssm", 12)):
        config = vssm.ModelConfig(kind=kind, features=28, width=WIDTH, layers=layers)  # pyright: ignore
        model = vssm.build(config).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=device.startswith("cuda"))

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            with torch.autocast(device.split(":")[0], torch.bfloat16, device.startswith("cuda")):
                loss = vssm.objective(model, x).loss.mean()  # pyright: ignore
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        took = median(step, device, max(3, repeats // 10), host=False)
        metrics[f"{kind}_step_ms_l{layers}"] = 1e3 * took
    return metrics


def time_packed(device: str, repeats: int) -> Metrics:
    """Times training steps of Mamba blocks on ragged rows, packed into one and padded."""
    rows, longest = (64, 1024) if device.startswith("cuda") else (8, 64)
    lengths = torch.linspace(1, longest, rows).long()
    starts = F.pad(lengths.cumsum(0), (1, 0))
    config = vssm.ModelConfig(kind="ssm", features=28, width=WIDTH)
    blocks = [MambaBlock(config).to(device) for _ in range(4)]
    weights = [weight for block in blocks for weight in block.parameters()]
    padded = torch.randn(rows, longest, WIDTH, device=device)
    real = (torch.arange(longest) < lengths[:, None]).to(device)
    packed = padded[real][None]

    def step(run: Callable[[], Tensor]) -> list[Tensor]:
        with torch.autocast(device.split(":")[0], torch.bfloat16, device.startswith("cuda")):
            loss = run().square().sum() / real.sum()
        return list(torch.autograd.grad(loss, weights))

    def run_padded() -> Tensor:
        x = padded
        for block in blocks:
            x = block(x)[0]
        return x * real[..., None]

    def run_packed() -> Tensor:
        x = packed
        for block in blocks:
            x = x + mix_packed(block.mixer, block.norm(x), starts)
        return x

    wanted, given = step(run_padded), step(run_packed)
    error, size = (
        torch.stack([t.float().square().sum() for t in each]).sum()
        for each in ([a - b for a, b in zip(given, wanted, strict=True)], wanted)
    )
    count = max(3, repeats // 10)
    times = [
        1e3 * median(lambda run=run: step(run), device, count, host=False)
        for run in (run_packed, run_padded)
    ]
    return {
        "packed_ms": times[0],
        "padded_ms": times[1],
        "packed_speedup": times[1] / times[0],
        "packed_error": float((error / size).sqrt()),
        "packed_fill": float(lengths.float().mean() / longest),
    }


def mix_packed(mixer: MambaMixer, x: Tensor, starts: Tensor) -> Tensor:
    """Does what a `MambaMixer` does, for sequences that are packed into one row."""
    u, z = apply_in_halves(mixer.in_proj, x)
    taps, bias = mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias
    assert bias is not None
    u, _ = causal_conv_silu(u, taps, bias, cu_seqlens=starts)
    dt, B, C = mixer.x_proj(u).split([mixer.rank, mixer.states, mixer.states], -1)
    inputs = u, mixer.dt_proj(dt), -torch.exp(mixer.A_log.float()), B, C, mixer.D, z
    y, _ = selective_scan(*inputs, mixer.dt_proj.bias, softplus=True, cu_seqlens=starts)
    return mixer.out_proj(y)


PARTS = {"calls": time_calls, "steps": time_steps, "packed": time_packed}


def main(
    out: Path | None = None, device: str = "cuda", repeats: int = 200, compile: str | None = None
) -> dict | None:
    """Prints a table and writes the result to a file if one is given.

    Arguments:
        out: The file.
        device: Where to measure.
        repeats: How many calls are timed; of steps, a tenth of it.
        compile: Only compiles the kernels of one part: calls, steps or packed.
    """
    if compile is not None:
        PARTS[compile](device, 1)
        return None
    if device.startswith("cuda"):  # all kernels at once: one after the other takes minutes
        command = [sys.executable, __file__, "--device", device, "--compile"]
        for process in [subprocess.Popen([*command, part]) for part in PARTS]:
            process.wait()
    metrics: Metrics = {}
    for part in PARTS.values():
        metrics |= part(device, repeats)
    for name, value in metrics.items():
        asked = ASKED.get(name) or ASKED.get(name.rsplit("_b", 1)[0])
        print(f"{name:<28}{value:>12.4g}" + (f"   asked {asked}" if asked else ""))
    settings = {"device": device, "repeats": repeats, "inner": INNER, "states": STATES}
    settings |= {"width": WIDTH, "shapes": [list(shape) for shape in SHAPES]}
    made = result("scan_overhead", shlex.join(["python", *sys.argv]), settings, metrics)
    if out is not None:
        write_result(out, made)
    return made


if __name__ == "__main__":
    tyro.cli(main)
