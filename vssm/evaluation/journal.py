"""What a long measurement has found so far, kept on disk: the same one goes on where it was stopped."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from vssm.storage import write_atomically

__all__ = ["Journal"]

_PAUSE = 5.0  # seconds between writes


class Journal:
    """Keeps parts of a measurement by name; as a context it removes its file once all went well.

    Every measurement has a file of its own, and one that is damaged is taken for none. A disk that is full
    costs what is kept, never the measurement. A kill costs the part that was being measured, and what was
    kept in the last five seconds.

    Arguments:
        path: The file, to whose name a hash of the subject is added; without one, parts are kept in memory
            alone.
        subject: What is measured and how, ready for JSON: parts that were found of another are not taken.

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
        self._subject = _digest(subject)
        self._path = None if path is None else path.with_stem(f"{path.stem}-{self._subject[:8]}")
        self._parts = self._read()
        self._written = time.monotonic()

    def get(self, part: str) -> Any:  # noqa: ANN401
        """Returns what was kept of a part, or None."""
        return self._parts.get(part)

    def __setitem__(self, part: str, found: Any) -> None:  # noqa: ANN401
        self._parts[part] = found
        if time.monotonic() - self._written >= _PAUSE:
            self._write()

    def measure(self, part: str, measured: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Returns what was kept of a part, or else measures it and keeps that."""
        if part not in self._parts:
            self[part] = measured()
        return self._parts[part]

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._write()
        elif self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._path.read_bytes()) if self._path is not None else None
            if not isinstance(content, dict) or content.get("subject") != self._subject:
                return {}
            parts = content.get("parts")
            return (
                parts if isinstance(parts, dict) and content.get("digest") == _digest(parts) else {}
            )
        except (OSError, ValueError, RecursionError):
            return {}

    def _write(self) -> None:
        if self._path is None or not self._parts:
            return
        content = {"subject": self._subject, "digest": _digest(self._parts), "parts": self._parts}
        with suppress(OSError):
            write_atomically(self._path, lambda file: file.write_text(json.dumps(content)))
        self._written = time.monotonic()


def _digest(content: Any) -> str:  # noqa: ANN401
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
