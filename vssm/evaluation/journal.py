"""Keeps on disk what a long measurement has found, so that it can go on after it was stopped."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vssm.storage import read_object, write_atomically

__all__ = ["PAUSE", "Journal"]

PAUSE = 5.0
"""Seconds between writes."""


class Journal:
    """Keeps parts of a measurement by name; as a context, removes its file if there was no error.

    A damaged file counts as none. A full disk costs what would be kept, never the measurement.
    A kill costs the part that was being measured and the last five seconds.

    Arguments:
        path: The file, to whose name a hash of the subject is added; None keeps parts in memory.
        subject: What is measured and how, ready for JSON. Parts of another subject are not used.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "part.json"
        ...     with suppress(KeyboardInterrupt), Journal(path, {"K": 10}) as journal:
        ...         journal["likelihoods"] = {"done": 3}
        ...         raise KeyboardInterrupt
        ...     with Journal(path, {"K": 10}) as journal:
        ...         print(journal.get("likelihoods"))
        ...     list(Path(folder).iterdir())
        {'done': 3}
        []
    """

    def __init__(self, path: Path | None = None, subject: Mapping[str, Any] | None = None) -> None:
        self._path, self._parts, self._written = None, {}, time.monotonic()
        if path is not None:
            digest = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()
            self._path = path.with_stem(f"{path.stem}-{digest[:16]}")
            with suppress(OSError, ValueError):
                self._parts = read_object(self._path)

    def get(self, part: str) -> Any:  # noqa: ANN401
        """Returns what was kept of a part, or None."""
        return self._parts.get(part)

    def __setitem__(self, part: str, found: Any) -> None:  # noqa: ANN401
        self._parts[part] = found
        if time.monotonic() - self._written >= PAUSE:
            self._write()

    def measure(self, part: str, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Returns what was kept of a part, or measures it and keeps the result."""
        if part not in self._parts:
            self[part] = measure()
        return self._parts[part]

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._write()
        elif self._path is not None:
            self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        if self._path is not None and self._parts:
            text = json.dumps(self._parts)
            with suppress(OSError):
                write_atomically(self._path, lambda file: file.write_text(text))
        self._written = time.monotonic()
