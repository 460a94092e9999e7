"""Lower bounds for times on this machine: the larger of moving data and of computing.

| bound           | data that is moved                     | what is computed                      |
| --------------- | -------------------------------------- | ------------------------------------- |
| a scan          | every operand once                     | multiply-adds (CUDA: exponentials)    |
| generation      | the weights once, if no cache has them | multiply-adds of all weight matrices  |
| a training step | weights, gradients and moments         | the same, three times for each token  |

The rates of copies and of matrix products are measured when the benchmark runs. Half-precision
products are the fastest of a GPU; a result as accurate as float32 takes three of them. Embedding
tables, attention, norms and random draws are not counted, so the true floor is higher.
"""

from typing import NamedTuple

import torch

from vssm.config import ModelConfig
from vssm.lab.bench.measure import take_times
from vssm.models import Model, build

__all__ = ["Rates", "generation_floor_ms", "scan_floor_ms", "training_ceiling"]

_PRODUCTS_PER_FLOAT32 = 3  # products of 11-bit halves
_UPDATE = 7  # AdamW reads weight, gradient and two moments, and writes three of them
_SCAN_OPERATIONS = 13  # multiply-adds per element of h: 9 for an exp with error 4e-7, 4 for h and y
_EXPONENTIALS = 16 * 1.98e6  # per multiprocessor and millisecond, at 1.98 GHz
_GENERATING_PARTS = {  # all other parts only read a prompt
    "tvae": ("decoder.",),
    "vssm": ("decoder.", "rungs."),
    "vrnn": ("stack.", "to_prior.", "to_likelihood."),
}


class Rates(NamedTuple):
    """What a machine does in a millisecond."""

    multiply_adds: float
    """In large matrix products: bfloat16 on a GPU, float32 on a CPU."""
    bytes: float
    """Read and written by a large copy."""
    cache: int
    """Bytes of weights that stay in a cache between calls."""

    @classmethod
    def measure(cls, device: torch.device) -> "Rates":
        cuda = device.type == "cuda"
        size, dtype = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        product_ms = min(take_times(lambda: matrix @ matrix, device, events=True))
        # CPU caches come in all sizes, so all weights may lie there.
        cache = torch.cuda.get_device_properties(device).L2_cache_size if cuda else 2**62
        return cls(size**3 / product_ms, _copy_rate(2**29 if cuda else 2**26, device), cache)


def scan_floor_ms(
    shape: tuple[int, int, int, int], rates: Rates, device: torch.device, backward: bool = False
) -> float:
    """Returns a lower bound for a scan of B sequences of T steps with D channels of N states."""
    batch, length, channels, states = shape
    elements = batch * length * channels * states
    if device.type == "cuda":
        # Forward moves u, dt, z and y. Backward reads u, dt, z and dy and writes three gradients.
        # B and C, and their gradients, count as well; the rest is small.
        operands, small = (7, 4) if backward else (4, 2)
        moved = 2 * batch * length * (operands * channels + small * states)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        return max(moved / rates.bytes, elements / (processors * _EXPONENTIALS))
    numbers = batch * length * (3 * channels + 2 * states) + channels * states * (1 + batch)
    # A copy of just as many bytes, since small operands stay in the cache of a CPU.
    moved_ms = 4 * numbers / _copy_rate(2 * numbers, device)
    return max(moved_ms, elements * _SCAN_OPERATIONS / rates.multiply_adds)


def generation_floor_ms(model: Model, batch: int, length: int, rates: Rates) -> float:
    """Returns a lower bound for unconditional generation in float32.

    >>> model = build(ModelConfig(kind="ssm", features=1, width=8, layers=1, state_size=2))
    >>> rates = Rates(multiply_adds=1e3, bytes=1e3, cache=2**20)
    >>> generation_floor_ms(model, 2, 10, rates)  # 20 x (8 x 32 + 16 x 5 + 16 + 16 x 8 + 8) weights
    9.76
    """
    weights = _matrix_weights(model, _GENERATING_PARTS.get(model.config.kind, ("",)))
    products = _PRODUCTS_PER_FLOAT32 if next(model.parameters()).is_cuda else 1
    moved = 4 * weights if 4 * weights > rates.cache else 0
    return max(products * batch * length * weights / rates.multiply_adds, moved / rates.bytes)


def training_ceiling(config: ModelConfig, tokens: int, rates: Rates) -> float:
    """Returns an upper bound for the tokens per second of training with so many tokens in a step.

    Each weight is multiplied three times per token: forward, for the gradient of its input, and
    for its own gradient.
    """
    with torch.device("meta"):
        model = build(config)
    products = 3 * tokens * _matrix_weights(model, ("",)) / rates.multiply_adds
    moved = 4 * _UPDATE * sum(p.numel() for p in model.parameters())
    return 1e3 * tokens / max(products, (moved if moved > rates.cache else 0) / rates.bytes)


def _copy_rate(size: int, device: torch.device) -> float:
    """Returns the bytes that a copy of so many bytes reads and writes in a millisecond."""
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / min(take_times(lambda: target.copy_(source), device, events=True))


def _matrix_weights(model: Model, parts: tuple[str, ...]) -> int:
    """Counts the weights in matrices that are multiplied, in parts whose names start like this."""
    return sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and not name.endswith("A_log") and "embed" not in name
        if name.startswith(parts)
    )
