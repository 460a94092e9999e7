"""A result file says what was measured, when, by which code, on which machine, by which command.

    {"name", "date", "commit", "machine", "command", "config", "metrics"}

`metrics` is flat and holds only numbers. A file does not say who made it: it has no host name, and
absolute paths lose their folders.
"""

import json
import math
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from vssm.data.storage import write_atomically


def result(
    name: str, command: str, config: Mapping[str, Any], metrics: Mapping[str, float | None]
) -> dict[str, Any]:
    """Returns metrics together with the date, commit, machine, command and settings.

    Arguments:
        name: The name of the result.
        command: What to type to get it again.
        config: The settings, ready for JSON.
        metrics: Numbers by name; NaN and infinity become null.

    Example:
        >>> made = result("scan", "vssm bench scan", {"dir": "/home/me/data"}, {"fwd_ms": 0.5})
        >>> made["config"], made["metrics"]
        ({'dir': 'data'}, {'fwd_ms': 0.5})
    """
    for key, value in metrics.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"metric {key!r} is {value!r}; give a number")
    return {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "command": shlex.join(map(_without_folders, shlex.split(command))),
        "config": _without_folders(config),
        "metrics": {
            key: value if value is not None and math.isfinite(value) else None
            for key, value in metrics.items()
        },
    }


def write_result(path: str | Path, made: Mapping[str, Any]) -> None:
    """Writes a result as JSON, atomically."""
    text = json.dumps(made, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write_text(text))


def machine() -> dict[str, str | int | None]:
    """Returns the processor, the GPU if there is one, and the versions that matter for speed."""
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*:\s*(.*\S)", info.read_text()) if info.is_file() else None
    return {
        "cpu": cpu[1] if cpu else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def commit() -> str | None:
    """Returns the commit of this package's repository, with "-dirty" if the package was changed."""
    package = Path(__file__).parents[1]
    # An installed copy may lie inside another repository, whose commit says nothing about it.
    if _git(package, "rev-parse", "--show-prefix") != f"{package.name}/":
        return None
    found = _git(package, "rev-parse", "HEAD")
    # Only changes of the package count: new results are written into the same clone.
    changed = found and _git(package, "status", "--porcelain", "--", ".")
    return f"{found}-dirty" if changed else found


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", *arguments]
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def _without_folders(value: Any) -> Any:  # noqa: ANN401
    """Cuts absolute paths, anywhere in a value that is ready for JSON, down to their last part."""
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
