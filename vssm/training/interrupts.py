"""Postpones Ctrl-C and SIGTERM until work is saved."""

import signal
import threading
from types import FrameType


class Interrupts:
    """Postpones the first Ctrl-C or SIGTERM of a `with` block; a second one acts at once.

    Only the main thread can do so.

    Example:
        >>> interrupts = Interrupts()
        >>> with interrupts:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     print("saved")
        saved
        >>> interrupts.came == signal.SIGTERM  # `act` would now end the process
        True
    """

    def __init__(self) -> None:
        self.came: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for name in (signal.SIGINT, signal.SIGTERM):
                # None: the handler was set from C and could not be restored.
                if signal.getsignal(name) not in (None, signal.SIG_IGN):
                    self._before[name] = signal.signal(name, self._note)

    def __exit__(self, *_: object) -> None:
        while self._before:
            name, before = self._before.popitem()
            signal.signal(name, before)  # type: ignore[arg-type]

    def act(self) -> None:
        """Does what the signal that came would have done."""
        self.__exit__()
        if self.came is not None:
            signal.raise_signal(self.came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = number
        self.__exit__()  # so that a second signal acts at once
