"""What no program of this accuracy can beat on this machine: the larger of two times.

| time     | what for                                                                                     |
| -------- | -------------------------------------------------------------------------------------------- |
| products | the multiply-adds of all weight matrices, at the rate of a large matrix product               |
| memory   | the bytes of the weights that must be moved, at the speed of a copy; none if the cache of a GPU holds them all |

Both rates are measured here and now. Products of half precision are the fastest of a GPU; results that equal
those of float32 take three of them. Tables of embeddings are read, not multiplied; scans, attention, norms and
draws do not count, so the true floor is higher.
"""

from typing import NamedTuple

import torch

from vssm.config import ModelConfig
from vssm.lab.bench.timing import kernel, spread
from vssm.models import Model, build

__all__ = ["Rates", "copy_bytes_per_ms", "generation_floor_ms", "training_ceiling"]

_EQUAL_PRODUCTS = 3  # of halves of 11 bits for one of float32
_UPDATE = 7  # AdamW reads weight, gradient and two moments, and writes three of them
# The parts that make a new step, where others only read what is given.
_PARTS = {
    "tvae": ("decoder",),
    "vssm": ("decoder", "rungs"),
    "vrnn": ("stack", "to_prior", "to_likelihood"),
}


def copy_bytes_per_ms(device: torch.device) -> float:
    """Returns how much a copy reads and writes together."""
    size = 2**29 if device.type == "cuda" else 2**26
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / spread(kernel(lambda: target.copy_(source), device))[0]


class Rates(NamedTuple):
    """What a machine does in a millisecond."""

    multiply_adds: float
    """Of large matrix products: bfloat16 on a GPU, float32 on a CPU."""
    bytes: float
    """Read and written by a large copy."""
    cache: int
    """Bytes of weights that need not be read from memory again."""

    @classmethod
    def measure(cls, device: torch.device) -> "Rates":
        cuda = device.type == "cuda"
        size, dtype = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        taken = min(kernel(lambda: matrix @ matrix, device))
        # Caches of CPUs are many and of all sizes; weights may lie there.
        cache = torch.cuda.get_device_properties(device).L2_cache_size if cuda else 2**62
        return cls(size**3 / taken, copy_bytes_per_ms(device), cache)


def generation_floor_ms(model: Model, batch: int, length: int, rates: Rates) -> float:
    """Returns a lower bound for the generation of so many sequences from nothing, in float32.

    >>> model = build(ModelConfig(kind="ssm", features=1, width=8, layers=1, state_size=2))
    >>> rates = Rates(multiply_adds=1e3, bytes=1e3, cache=2**20)
    >>> generation_floor_ms(model, 2, 10, rates)  # 8 x 32 + 16 x 5 + 16 + 16 x 8 + 8 weights, 20 times
    9.76
    """
    parts = _PARTS.get(model.config.kind)
    weights = _matrices(model, None if parts is None else tuple(f"{part}." for part in parts))
    products = _EQUAL_PRODUCTS if next(model.parameters()).is_cuda else 1
    moved = 4 * weights if 4 * weights > rates.cache else 0
    return max(products * batch * length * weights / rates.multiply_adds, moved / rates.bytes)


def training_ceiling(config: ModelConfig, tokens: int, rates: Rates) -> float:
    """Returns an upper bound for tokens a second of training with so many in a step.

    A weight is multiplied three times a token: forwards, for its input's gradient, and for its own.
    """
    with torch.device("meta"):
        model = build(config)
    products = 3 * tokens * _matrices(model) / rates.multiply_adds
    moved = 4 * _UPDATE * sum(p.numel() for p in model.parameters())
    return 1e3 * tokens / max(products, (moved if moved > rates.cache else 0) / rates.bytes)


def _matrices(model: Model, parts: tuple[str, ...] | None = None) -> int:
    """Returns the number of weights in matrices that are multiplied, of the parts with these names."""
    return sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and not name.endswith("A_log") and "embed" not in name
        if parts is None or name.startswith(parts)
    )
