"""Reads the body of a request: its fields, with arrays in place of lists of numbers.

The parser keeps Python's global lock for up to 0.2 s per body of 8 MiB, so parsing in a thread would stop the
event loop all the same. A child process reads large bodies instead. It runs this file as a script, which is
why nothing of `vssm` is imported here.

An array file is read by its header and its length alone: nothing is unpickled, and a header that promises
more than was sent is refused.
"""

import ast
import asyncio
import base64
import binascii
import json
import math
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pydantic_core

__all__ = ["BadBody", "BodyReader", "read_array", "read_body"]

_SMALL = 64 * 2**10  # bytes that are read in a millisecond or two
_MAX_FIELDS = 64
_MAX_HEADER = 4096


class BadBody(Exception):
    """A body that is refused; its arguments are those of `Refused`."""


class BodyReader:
    """Reads bodies, large ones in a child process, one at a time.

    Arguments:
        max_lists: The most lists in one body.
    """

    def __init__(self, max_lists: int) -> None:
        self._max_lists = max_lists
        self._thread = ThreadPoolExecutor(1, "vssm-body")
        self._child: subprocess.Popen[bytes] | None = None

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
        if self._child is None:
            command = [sys.executable, "-P", __file__, str(self._max_lists)]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        to, back = self._child.stdin, self._child.stdout
        assert to is not None and back is not None
        try:
            to.write(len(body).to_bytes(8, "little"))
            to.write(body)
            to.flush()
            reply = pydantic_core.from_json(back.read(int.from_bytes(back.read(8), "little")))
            arrays = {
                name: np.frombuffer(back.read(size), dtype).reshape(shape)
                for name, size, dtype, shape in reply["arrays"]
            }
        except (OSError, ValueError):  # the child was killed; the next body starts another
            self._stop()
            raise BadBody(
                503, "not_ready", "the body could not be read; try again", None, 1
            ) from None
        if reply["refused"] is not None:
            raise BadBody(*reply["refused"])
        return reply["content"] | arrays if arrays else reply["content"]

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


def read_body(body: bytes, max_lists: int) -> Any:  # noqa: ANN401
    """Returns the fields of a body. Lists of numbers and .npy files are arrays.

    Lists and objects that no field takes come back empty, and so does a body that is no object: the error
    that follows does not repeat them.

    Example:
        >>> read_body(b'{"num": 2, "prompt": [[0, 1]]}', 10)
        {'num': 2, 'prompt': array([[0, 1]])}
    """
    if body.count(b"[") > max_lists:  # each costs as much as many numbers
        raise BadBody(
            422, "too_many", f"the body holds too many lists; allowed: at most {max_lists}"
        )
    try:
        content = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError:
        raise BadBody(
            400, "not_json", "the body is no JSON; allowed: an object, finite numbers"
        ) from None
    if not isinstance(content, dict):
        return []
    if len(content) > _MAX_FIELDS:  # each unknown field would have a message of its own
        raise BadBody(
            422, "too_many", f"{len(content)} fields is not allowed; allowed: {_MAX_FIELDS}"
        )
    for name in ("prompt", "x"):
        if content.get(name) is not None and content.get(f"{name}_npy") is not None:
            raise BadBody(
                422, "invalid", f"{name} and {name}_npy were both given; allowed: one", name
            )
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
    """Returns the array of a .npy file in base64; whatever is no plain array of numbers is a ValueError.

    Example:
        >>> import io
        >>> file = io.BytesIO()
        >>> np.save(file, np.arange(3.0))
        >>> read_array(base64.b64encode(file.getvalue()).decode())
        array([0., 1., 2.])
    """
    try:
        data = base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("the .npy file is no base64; allowed: standard base64") from None
    if data[:6] != b"\x93NUMPY" or len(data) < 12:
        raise ValueError("the .npy file does not start like one; allowed: what numpy.save writes")
    width = 2 if data[6] == 1 else 4
    start = 8 + width + int.from_bytes(data[8 : 8 + width], "little")
    if start > min(len(data), _MAX_HEADER):
        raise ValueError(
            f"the .npy file has a header of {start} bytes; allowed: {_MAX_HEADER}, none missing"
        )
    try:
        header = ast.literal_eval(data[8 + width : start].decode("latin1").strip())
        dtype, shape = np.dtype(header["descr"]), header["shape"]
        order = "F" if header["fortran_order"] else "C"
        fits = type(shape) is tuple and len(shape) <= 3
        fits = fits and all(type(size) is int and size >= 0 for size in shape)
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        raise ValueError(
            "the .npy file has a damaged header; allowed: what numpy.save writes"
        ) from None
    if not fits or dtype.kind not in "iuf":  # objects would be pickles
        raise ValueError(
            "the .npy file holds no array of numbers; allowed: integers or floats, 1 to 3 axes"
        )
    if math.prod(shape) * dtype.itemsize != len(data) - start:
        raise ValueError("the .npy file has another length than its header says")
    return np.frombuffer(data, dtype, offset=start).reshape(shape, order=order)


def _from_lists(value: list[Any], name: str) -> np.ndarray:
    wrong = ValueError(
        f"{name} is no array of numbers; allowed: nested lists of numbers, equally long"
    )
    try:
        # As objects first: numpy would make every string of a list as long as the longest.
        leaves = np.array(value, object)
        if leaves.ndim > 3 or not {type(leaf) for leaf in leaves.flat} <= {int, float}:
            raise wrong
        array = np.array(value)
    except (ValueError, OverflowError):
        raise wrong from None
    if array.dtype.kind not in "iuf":  # whole numbers past 64 bits
        raise wrong
    return array


def _serve(max_lists: int) -> None:
    """Reads bodies from stdin until it is closed: a length of 8 bytes, then the body.

    An answer on stdout is a length of 8 bytes, JSON, and the bytes of the arrays that the JSON names.
    """
    for name in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # sent to all of a group; the server may still need us
        signal.signal(name, signal.SIG_IGN)
    given, back = sys.stdin.buffer, sys.stdout.buffer
    while size := given.read(8):
        content, arrays, refused = None, {}, None
        try:
            content = read_body(given.read(int.from_bytes(size, "little")), max_lists)
        except BadBody as error:
            refused = error.args
        if isinstance(content, dict):
            arrays = {
                name: np.ascontiguousarray(value)
                for name, value in content.items()
                if isinstance(value, np.ndarray)
            }
            content = {name: value for name, value in content.items() if name not in arrays}
        heads = [
            (name, array.nbytes, array.dtype.str, array.shape) for name, array in arrays.items()
        ]
        reply = json.dumps({"content": content, "arrays": heads, "refused": refused}).encode()
        back.write(len(reply).to_bytes(8, "little") + reply)
        for array in arrays.values():
            back.write(array.data)
        back.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
