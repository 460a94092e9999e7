"""Ctrl-C and SIGTERM: put off until work is saved, and in one line while a command is still imported."""

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

__all__ = ["Interrupts", "command_ends_at_once", "is_command"]


class Interrupts:
    """Notes the first Ctrl-C or SIGTERM for later; a second one acts at once.

    Example:
        >>> interrupts = Interrupts()
        >>> with interrupts.put_off():
        ...     signal.raise_signal(signal.SIGTERM)
        ...     print("saved")
        saved
        >>> interrupts.came == signal.SIGTERM  # and `act` would now end the process
        True
    """

    def __init__(self) -> None:
        self.came: int | None = None
        self._before: dict[int, object] = {}

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Notes signals of what is inside; only the main thread of a process can."""
        if threading.current_thread() is threading.main_thread():
            for name in (signal.SIGINT, signal.SIGTERM):
                # None: it was set from C, and could not be put back.
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
        self._restore()  # whoever does not want to wait asks again

    def _restore(self) -> None:
        while self._before:
            name, before = self._before.popitem()
            signal.signal(name, before)  # type: ignore[arg-type]


@contextmanager
def command_ends_at_once() -> Iterator[None]:
    """Ends the command line with one line when Ctrl-C comes inside, where nothing but imports is done.

    Other programs that import the package get their `KeyboardInterrupt`, as from any import.
    """
    own = (
        is_command()
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT)
        is signal.default_int_handler  # else it is ignored, or others' to use
    )
    if not own:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"vssm: stopped by the user\n")
    os._exit(130)  # an exception would be lost in imports that go on without a module that fails


def is_command() -> bool:
    """Says whether this process is `vssm`, or `python -m vssm` or one of its modules."""
    program = sys.argv[0] if sys.argv else ""
    if (
        program == "-m"
    ):  # Python is still looking for the module, and imports the package that it is in
        return _module().split(".")[0] == "vssm"
    return Path(program).stem == "vssm" or Path(program) == Path(__file__).with_name("__main__.py")


def _module() -> str:
    """Returns what Python was told to run by -m: the rest of that word, or the next one."""
    words = iter(sys.orig_argv[1:])
    for word in words:
        option = re.match(r"-[A-Za-z]*?([mWX])(.*)", word)  # -W and -X have values too
        if option is not None:
            value = option[2] or next(words, "")
            if option[1] == "m":
                return value
    return ""
