"""The envelope of a result: what was measured, when, by which code, on which machine, with which command.

    {"name", "date", "commit", "machine", "command", "config", "metrics"}

`metrics` is flat and holds numbers only. Nothing in it says who ran it or where their files lie: no host
name, and of an absolute path only the last part.
"""

import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from vssm.storage import write_atomically

__all__ = ["commit", "machine", "result", "source", "write_result"]


def result(
    name: str, command: str, config: Mapping[str, Any], metrics: Mapping[str, float | None]
) -> dict[str, Any]:
    """Wraps metrics with what is needed to trust and repeat them.

    Arguments:
        name: What the result is called.
        command: What to type to get it again.
        config: The settings, ready for JSON.
        metrics: Numbers by name; one that is not finite becomes null.

    Example:
        >>> made = result("scan", "vssm bench scan", {"dir": "/home/me/data"}, {"fwd_ms_b1_t8": 0.5})
        >>> made["config"], made["metrics"]
        ({'dir': 'data'}, {'fwd_ms_b1_t8': 0.5})
    """
    numbers: dict[str, float | None] = {}
    for key, value in metrics.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"metric {key!r} is {value!r}; allowed: a number")
        numbers[key] = value if value is not None and math.isfinite(value) else None
    return {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "command": shlex.join(map(_without_folder, shlex.split(command))),
        "config": _without_folders(config),
        "metrics": numbers,
    }


def write_result(path: str | Path, made: Mapping[str, Any]) -> None:
    """Writes a result as JSON: all of it or nothing."""
    text = json.dumps(made, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write_text(text))


def machine() -> dict[str, str | int | None]:
    """Returns the processor, its cores, the GPU if there is one, and the versions that matter for speed."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def commit() -> str | None:
    """Returns the commit of this package's own repository, with "-dirty" after it when its code differs."""
    package = Path(__file__).parents[1]
    # An installed copy may lie inside somebody else's repository, whose commit says nothing about it.
    if _git(package, "rev-parse", "--show-prefix") != f"{package.name}/":
        return None
    found = _git(package, "rev-parse", "HEAD")
    # Only the package: results that replace committed ones are written into the same clone.
    return (
        f"{found}-dirty" if found and _git(package, "status", "--porcelain", "--", ".") else found
    )


def source(but: tuple[str, ...] = (), package: Path = Path(__file__).parents[1]) -> str:
    """Returns a digest of the code of this package: a commit does not tell of changes, or is not known.

    Arguments:
        but: Beginnings of names in the package that do not count.
        package: Its folder.

    Example:
        >>> source() == source(), source() == source(but=("cli/",))
        (True, False)
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package).as_posix()
        if not place.startswith(but):
            digest.update(f"{place}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _without_folders(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(item) for item in value]
    return _without_folder(value) if isinstance(value, str) else value


def _without_folder(text: str) -> str:
    return Path(text).name if Path(text).is_absolute() else text
