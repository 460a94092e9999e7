"""Postpones Ctrl-C and SIGTERM until work is saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupts"]


class Interrupts:
    """Postpones the first Ctrl-C or SIGTERM; a second one acts at once.

    Example:
        >>> interrupts = Interrupts()
        >>> with interrupts.put_off():
        ...     signal.raise_signal(signal.SIGTERM)
        ...     print("saved")
        saved
        >>> interrupts.came == signal.SIGTERM  # `act` would now end the process
        True
    """

    def __init__(self) -> None:
        self.came: int | None = None
        self._before: dict[int, object] = {}

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Postpones signals inside the `with` block; only the main thread can do so."""
        if threading.current_thread() is threading.main_thread():
            for name in (signal.SIGINT, signal.SIGTERM):
                # None: the handler was set from C and could not be restored.
                if signal.getsignal(name) not in (None, signal.SIG_IGN):
                    self._before[name] = signal.signal(name, self._note)
        try:
            yield
        finally:
            self._restore()

    def act(self) -> None:
        """Does what the signal that came would have done."""
        self._restore()
        if self.came is not None:
            signal.raise_signal(self.came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = number
        self._restore()  # so that a second signal acts at once

    def _restore(self) -> None:
        while self._before:
            name, before = self._before.popitem()
            signal.signal(name, before)  # type: ignore[arg-type]
