"""Parses the body of a request into its fields, with arrays in place of lists of numbers.

The JSON parser holds Python's global lock for up to 0.2 s per body of 8 MiB, which would stop the
event loop even from another thread. A child process parses large bodies instead. It runs this file
as a script, so this file imports nothing from `vssm`: PyTorch would take seconds to load.
"""

import asyncio
import base64
import io
import pickle
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pydantic_core

__all__ = ["BadBody", "BodyReader", "read_array", "read_body"]

_SMALL = 64 * 2**10  # bytes that are parsed in a millisecond or two
_MAX_FIELDS = 64
_MAX_HEADER = 4096


class BadBody(Exception):
    """A body that is refused; its arguments are those of `Refused`."""


class BodyReader:
    """Parses bodies, large ones in a child process, one at a time.

    Arguments:
        max_lists: The most lists in one body.
    """

    def __init__(self, max_lists: int) -> None:
        self._max_lists = max_lists
        self._thread = ThreadPoolExecutor(1, "vssm-body")
        self.child: subprocess.Popen[bytes] | None = None

    async def read(self, body: bytes) -> Any:  # noqa: ANN401
        """Returns what `read_body` returns, or raises `BadBody`."""
        if len(body) <= _SMALL:
            return read_body(body, self._max_lists)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, body)

    def close(self) -> None:
        """Ends the child process."""
        self._thread.shutdown()
        self._stop()

    def _ask(self, body: bytes) -> Any:  # noqa: ANN401
        if self.child is None:
            command = [sys.executable, "-P", __file__, str(self._max_lists)]
            self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        to_child, from_child = self.child.stdin, self.child.stdout
        assert to_child is not None and from_child is not None
        try:
            pickle.dump(body, to_child, protocol=5)
            to_child.flush()
            content, refusal = pickle.load(from_child)
        except (OSError, EOFError, pickle.UnpicklingError):  # killed; the next body starts another
            self._stop()
            message = "the body could not be parsed; try again"
            raise BadBody(503, "not_ready", message, None, 1) from None
        if refusal is not None:
            raise BadBody(*refusal)
        return content

    def _stop(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.communicate()
            self.child = None


def read_body(body: bytes, max_lists: int) -> Any:  # noqa: ANN401
    """Returns the fields of a body. Lists of numbers and .npy files become arrays.

    Lists and objects in other fields come back empty, and so does a body that is not an object: the
    error that follows does not repeat them.

    Example:
        >>> read_body(b'{"num": 2, "prompt": [[0, 1]]}', 10)
        {'num': 2, 'prompt': array([[0, 1]])}
    """
    if body.count(b"[") > max_lists:  # a list costs as much as many numbers
        message = f"the body has too many lists; allowed: at most {max_lists}"
        raise BadBody(422, "too_many", message)
    try:
        content = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError:
        message = "the body is not valid JSON; allowed: an object with finite numbers"
        raise BadBody(400, "not_json", message) from None
    if not isinstance(content, dict):
        return []
    if len(content) > _MAX_FIELDS:
        message = f"the body has {len(content)} fields; allowed: at most {_MAX_FIELDS}"
        raise BadBody(422, "too_many", message)
    for name, value in content.items():
        try:
            if name in ("prompt", "x") and isinstance(value, list):
                content[name] = _from_lists(value, name)
            elif name in ("prompt_npy", "x_npy") and isinstance(value, str):
                content[name] = read_array(value)
            elif isinstance(value, list | dict):
                content[name] = type(value)()
        except ValueError as error:
            raise BadBody(422, "invalid", str(error), name) from None
    return content


def read_array(content: str) -> np.ndarray:
    """Returns the array of a .npy file in base64. Nothing is unpickled.

    Example:
        >>> file = io.BytesIO()
        >>> np.save(file, np.arange(3.0))
        >>> read_array(base64.b64encode(file.getvalue()).decode())
        array([0., 1., 2.])
    """
    try:
        data = base64.b64decode(content, validate=True)
        file, npy = io.BytesIO(data), np.lib.format
        first = npy.read_magic(file)[0] == 1
        header = npy.read_array_header_1_0 if first else npy.read_array_header_2_0
        shape, fortran, dtype = header(file, max_header_size=_MAX_HEADER)
        if len(shape) > 3 or min(shape, default=0) < 0 or dtype.kind not in "iuf":
            raise ValueError
        array = np.frombuffer(data, dtype, offset=file.tell())
        return array.reshape(shape, order="F" if fortran else "C")
    except Exception:  # a hostile header can raise almost anything
        raise ValueError(
            "the .npy file is damaged or does not contain numbers; allowed: base64 of what "
            "numpy.save writes, integers or floats with 1 to 3 axes"
        ) from None


def _from_lists(value: list[Any], name: str) -> np.ndarray:
    try:
        # As objects first: numpy would make every string of a list as long as the longest.
        leaves = np.array(value, object)
        if leaves.ndim <= 3 and {type(leaf) for leaf in leaves.flat} <= {int, float}:
            array = np.array(value)
            if array.dtype.kind in "iuf":  # integers beyond 64 bits become objects
                return array
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{name} is not an array; allowed: nested lists of numbers, equally long")


def _serve(max_lists: int) -> None:
    """Parses bodies from stdin until it is closed."""
    for name in (signal.SIGINT, signal.SIGTERM):  # the server still needs us while it drains
        signal.signal(name, signal.SIG_IGN)
    while True:
        try:
            body = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply = read_body(body, max_lists), None
        except BadBody as error:
            reply = None, error.args
        pickle.dump(reply, sys.stdout.buffer, protocol=5)  # arrays are not copied again
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
