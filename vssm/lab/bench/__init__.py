"""How fast things are: `vssm bench scan`, `vssm bench train` and `vssm bench generate`.

All report medians after a warm-up, record backend, versions, device and commit, and note what could
not run.
"""

from collections.abc import Callable
from typing import Any

from vssm.lab.bench.generate import main_generate
from vssm.lab.bench.scan import main_scan
from vssm.lab.bench.train import main_train

__all__ = ["BENCHMARKS", "main_generate", "main_scan", "main_train"]

BENCHMARKS: dict[str, Callable[..., Any]] = {
    "scan": main_scan,
    "train": main_train,
    "generate": main_generate,
}
