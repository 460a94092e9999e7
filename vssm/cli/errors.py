"""A mistake of the user gives one line and an exit code; a bug gives a traceback.

| what happened                         | exit code |
| ------------------------------------- | --------- |
| a wrong option, value or file         | 2         |
| there is not enough memory            | 2         |
| the user pressed Ctrl-C               | 130       |
| SIGTERM                               | 143       |
| the reader of our output has gone     | 1, without a message |
"""

import contextlib
import errno
import re
import signal
import sys
import warnings
from collections.abc import Iterator

# On a CPU, on a GPU, and for a tensor with more bytes than an address can have.
_NO_MEMORY = "can't allocate memory|out of memory|Storage size calculation overflowed"

_WRONG_PLACE = {errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT}
_WRONG_PLACE |= {errno.ENOTDIR, errno.EPERM, errno.EROFS}

# What tyro and Python say about a text that is not a number, in the words of a user.
_PLAIN = {
    r"^Error parsing \w+: ": "",  # options that do not fit each other; the message names them
    r"invalid literal for int\(\) with base 10: (.*)": r"\1 is not allowed; give INT",
    r"could not convert string to float: (.*)": r"\1 is not allowed; give FLOAT",
    r"give INT$": "give a whole number",
    r"give FLOAT$": "give a number",
}


@contextlib.contextmanager
def report_mistakes() -> Iterator[None]:
    """Ends the program with one line when the code inside meets a mistake of the user."""
    try:
        yield
    except ValueError as error:
        _fail(str(error))
    except (MemoryError, RuntimeError) as error:  # PyTorch raises RuntimeError on a CPU
        text = " ".join(str(error).split())
        if isinstance(error, RuntimeError) and not re.search(_NO_MEMORY, text):
            raise
        asked = re.search(r"tried to allocate [\d.]+ \w+", text, re.IGNORECASE)
        _fail(f"out of memory{f' ({asked[0].lower()})' if asked else ''}; ask for less at once")
    except BrokenPipeError:
        raise SystemExit(1) from None
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        advice = "; give another file or folder" if error.errno in _WRONG_PLACE else ""
        _fail(f"{error.strerror or error}{place}{advice}")
    except KeyboardInterrupt:
        _fail("stopped by the user", 130)


@contextlib.contextmanager
def report_warnings() -> Iterator[None]:
    """Shows warnings for users as notes, without the line of code that they come from."""

    def show(message: object, category: type[Warning], *rest: object, **options: object) -> None:
        if issubclass(category, UserWarning):
            print(f"note: {message}", file=sys.stderr)
        else:  # warnings of libraries are for the maintainers of this program
            before(message, category, *rest, **options)  # type: ignore[arg-type]

    with warnings.catch_warnings():
        before, warnings.showwarning = warnings.showwarning, show
        yield


@contextlib.contextmanager
def report_sigterm() -> Iterator[None]:
    """Ends the code inside on SIGTERM as on Ctrl-C: one line, and no half-written files."""
    before = signal.signal(signal.SIGTERM, lambda *_: _fail("stopped by SIGTERM", 143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def box_as_line(box: str, command: str) -> str:
    """Returns tyro's message about wrong options, which it draws in a box, as one line."""
    # Rules separate message, advice and a pointer to the help; without Unicode a title is first.
    box = re.sub(r"\x1b\[[\d;]*m", "", box)  # colours, on a terminal
    rule = r"[^\n]*(?:───|---)[^\n]*\n"
    parts = [" ".join(part.split()) for part in re.split(rule, box.replace("│", " "))]
    message, *rest = [part for part in parts if part][0 if "╭" in box else 1 :]
    # For an option that may be left out, tyro also says why the value is not None.
    union = r"no type matching \{None\}\|(?:\{\[)?(\w+).*? instantiated from \[(.*?)\]\..*"
    message = re.sub(union, r"\2 is not allowed; give \1", message).removesuffix(".")
    for pattern, plain in _PLAIN.items():
        message = re.sub(pattern, plain, message)
    nearest = re.search(r"Perhaps you meant: (--[\w.-]+)", " ".join(rest))
    return message + (
        f" (did you mean {nearest[1]}?)" if nearest else f"; see vssm {command} --help"
    )


def _fail(message: str, code: int = 2) -> None:
    print(f"vssm: {message}", file=sys.stderr)
    raise SystemExit(code)
