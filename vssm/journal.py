"""What a long measurement has found so far, kept on disk: the same one goes on where it was stopped."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from vssm.storage import write_atomically

__all__ = ["Journal"]

_PAUSE = 5.0  # seconds between writes: what a kill may lose


class Journal:
    """Keeps parts of a measurement by name; as a context it removes its file once all went well.

    A file of another measurement, or one that is damaged, is taken for none. A disk that is full costs what
    is kept, never the measurement.

    Arguments:
        path: The file; without one, parts are kept in memory alone.
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
        ...     path.exists()
        {'done': 3}
        False
    """

    def __init__(self, path: Path | None = None, subject: Mapping[str, Any] | None = None) -> None:
        self._path = path
        self._subject = json.loads(json.dumps(subject))
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._write()
        elif self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._path.read_bytes()) if self._path is not None else None
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(content, dict) or content.get("subject") != self._subject:
            return {}
        return content["parts"] if isinstance(content.get("parts"), dict) else {}

    def _write(self) -> None:
        if self._path is None or not self._parts:
            return
        text = json.dumps({"subject": self._subject, "parts": self._parts})
        with suppress(OSError):
            write_atomically(self._path, lambda file: file.write_text(text))
        self._written = time.monotonic()
