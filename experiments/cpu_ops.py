"""Times the CPU kernels beside their PyTorch twins: forward and backward, on one thread.

python experiments/cpu_ops.py
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from vssm.distributions import gumbel_uniform
from vssm.ops import causal_conv_silu
from vssm.ops.latents import sample_and_kl

REPEATS = 30
Case = Callable[[str], tuple[Callable[[], Tensor], list[Tensor]]]
"""Maps a backend to the function that is timed and the inputs of its gradients."""


def convolve(batch: int, length: int, channels: int) -> Case:
    x = torch.randn(batch, length, 2 * channels)[..., :channels].requires_grad_()
    weights = [
        torch.randn(channels, 4, requires_grad=True),
        torch.randn(channels, requires_grad=True),
    ]
    return lambda backend: (
        lambda: causal_conv_silu(x, *weights, backend=backend)[0].sum(),
        [x, *weights],
    )


def draw(*shape: int) -> Case:
    logits, noise = torch.randn(shape, requires_grad=True), gumbel_uniform(shape)

    def run(backend: str) -> Tensor:
        z, kl = sample_and_kl(logits, noise, backend=backend)
        return z.sum() + kl.sum()

    return lambda backend: (lambda: run(backend), [logits])


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'':36}{'PyTorch':>16}{'numba':>16}")
    for name, make, sizes in (
        ("convolution", convolve, ((64, 28, 320), (16, 256, 512), (1, 28, 512))),
        ("draw, KL", draw, ((64, 28, 32, 32), (64, 28, 12, 16), (64, 28, 1, 64))),
    ):
        for size in sizes:
            made, cells = make(*size), []
            for backend in ("reference", "numba"):
                function, inputs = made(backend)
                times: tuple[list[float], list[float]] = [], []
                for _ in range(REPEATS):
                    start = time.perf_counter()
                    loss = function()
                    middle = time.perf_counter()
                    torch.autograd.grad(loss, inputs)
                    times[0].append(middle - start)
                    times[1].append(time.perf_counter() - middle)
                cells.append(" + ".join(f"{1e3 * statistics.median(part):.2f}" for part in times))
            print(f"{name} {size!s:<24}".ljust(46) + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
