"""A mistake of the user gives one line and an exit code; anything else is a bug and gives a traceback.

| what happened                         | exit code |
| ------------------------------------- | --------- |
| a wrong option, value or file         | 2         |
| the user stopped us                   | 130       |
| SIGTERM stopped us                    | 143       |
| there is not enough memory            | 2         |
| the reader of our output has gone     | 1, and nothing is said |
"""

import contextlib
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator

__all__ = ["box_as_line", "mistakes_in_one_line", "stopped_by_signal", "warnings_in_one_line"]

# On a CPU, on a GPU, and of a tensor with more bytes than an address can have.
_NO_MEMORY = "can't allocate memory|out of memory|Storage size calculation overflowed"


@contextlib.contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """Ends the program with one line when what is inside meets a mistake of the user."""
    try:
        yield
    except ValueError as error:
        _fail(str(error))
    except (MemoryError, RuntimeError) as error:  # torch has no error of its own for it on a CPU
        text = " ".join(str(error).split())
        if isinstance(error, RuntimeError) and not re.search(_NO_MEMORY, text):
            raise
        asked = re.search(r"(?:tried to allocate|Tried to allocate) [\d.]+ \w+", text)
        _fail(f"out of memory{f' ({asked[0].lower()})' if asked else ''}; allowed: less at once")
    except BrokenPipeError:  # the reader of our output has seen enough
        raise SystemExit(1) from None
    except OSError as error:
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    except KeyboardInterrupt:
        _fail("stopped by the user", 130)


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Shows warnings of what is inside as notes, without the line of the program that they come from."""

    def show(message: object, category: type[Warning], *rest: object, **options: object) -> None:
        if issubclass(category, UserWarning):
            print(f"note: {message}", file=sys.stderr)
        else:  # those of libraries are for who maintains this program
            before(message, category, *rest, **options)  # type: ignore[arg-type]

    with warnings.catch_warnings():
        before, warnings.showwarning = warnings.showwarning, show
        yield


@contextlib.contextmanager
def stopped_by_signal() -> Iterator[None]:
    """Ends what is inside on SIGTERM as Ctrl-C does: it is said, and half-written files are removed."""
    if threading.current_thread() is not threading.main_thread():  # where no signals can be caught
        yield
        return

    def stop(*_: object) -> None:
        _fail("stopped by SIGTERM", 143)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def box_as_line(box: str, command: str) -> str:
    """Returns in one line what tyro says of wrong options of a command in a box."""
    # Rules part the box into message, advice and a pointer to the help; without Unicode a title comes first.
    parts = [
        " ".join(part.split())
        for part in re.split(r"[^\n]*(?:───|---)[^\n]*\n", box.replace("│", " "))
    ]
    message, *rest = [part for part in parts if part][0 if "╭" in box else 1 :]
    nearest = re.search(r"--[\w.-]+", rest[0]) if rest and "Perhaps you meant" in rest[0] else None
    # Of an option that may be left out tyro tells how it failed to be None, too.
    union = r"no type matching \{None\}\|(?:\{\[)?(\w+).*? could be instantiated from \[(.*?)\]\. Got errors:.*"
    message = re.sub(union, r"\2 is not allowed; allowed: \1", message)
    hint = f" (did you mean {nearest[0]}?)" if nearest else f"; see vssm {command} --help"
    return message.removesuffix(".") + hint


def _fail(message: str, code: int = 2) -> None:
    print(f"vssm: {message}", file=sys.stderr)
    raise SystemExit(code)
