"""Files that are whole or absent: written under a temporary name, flushed to the disk, renamed."""

import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "check_checksum",
    "checksum",
    "is_device",
    "read_object",
    "why_read_only",
    "with_checksum",
]
__all__ += ["write_atomically"]

_CHECKSUM = "crc32"  # the key of it in the metadata of a safetensors file

_LONGEST = 255  # bytes of a name, on most systems
_MORE = len(f"..{secrets.token_hex(6)}.tmp")
_LEFT = 3600  # seconds after which nobody writes to a temporary file any more


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> None:
    """Calls `write` on a temporary path in the same folder, then renames it to `path`.

    A reader finds the old file or the new one, never half of one; if `write` fails, the old one stays. What
    a process that was killed has left of the same file an hour ago or longer is removed. A device or a pipe,
    such as /dev/null, is written to and stays what it is.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_atomically(f"{folder}/note.txt", lambda file: file.write_text("done"))
        ...     [file.name for file in Path(folder).iterdir()]
        ['note.txt']
    """
    path = Path(path)
    if not path.name:
        raise ValueError(f"path={str(path)!r} is not allowed; allowed: the name of a file")
    if is_device(path):
        _write_through(path, write)
        return
    temporary = path.with_name(f".{_start(path)}.{secrets.token_hex(6)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)  # some libraries replace the file by one that only its owner can read
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        _remove_left(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself must reach the disk too
        finally:
            os.close(folder)
    except (OSError, SafetensorError) as error:  # under the name that the user knows
        if (
            not isinstance(error, OSError) or error.errno is None
        ):  # numpy tells how much it wrote, no more
            raise OSError(f"{str(path)!r} could not be written: {error}") from None
        if error.filename not in (None, str(temporary)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(
            OSError
        ):  # a disk that became read-only: what is to be said is why the write failed
            temporary.unlink(missing_ok=True)


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; what is wrong with it is said in one line."""
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{str(path)!r} is damaged: it is no JSON object")
    return values


def with_checksum(tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> dict[str, str]:
    """Returns the metadata of a safetensors file with a checksum of it and of the tensors, on a CPU.

    Example:
        >>> import torch
        >>> with_checksum({"h": torch.ones(2)}, {"format": "1"})
        {'format': '1', 'crc32': '...'}
    """
    return {**metadata, _CHECKSUM: checksum(tensors, metadata)}


def check_checksum(name: str, tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> None:
    """Raises where tensors and metadata, read from a file, are not those that it was written with.

    Files of versions that wrote no checksum are taken as they are.
    """
    rest = dict(metadata)
    found = rest.pop(_CHECKSUM, None)
    if found is not None and found != checksum(tensors, rest):
        raise ValueError(
            f"{name} is damaged: it differs from its checksum; allowed: a file as it was written"
        )


def checksum(tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str] | None = None) -> str:
    """Returns the CRC-32 of tensors on a CPU, with their names and shapes, and of metadata.

    Example:
        >>> import torch
        >>> checksum({"h": torch.ones(2)}) == checksum({"h": torch.zeros(2)})
        False
    """
    import torch  # which takes seconds, and who calls this has

    total, metadata = 0, metadata or {}
    for key in sorted(metadata):
        total = zlib.crc32(f"{key}={metadata[key]}\n".encode(), total)
    for key in sorted(tensors):
        tensor = tensors[key]
        total = zlib.crc32(f"{key}={tensor.dtype}{tuple(tensor.shape)}\n".encode(), total)
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        total = zlib.crc32(content.numpy().data, total)
    return f"{total:08x}"


def is_device(path: Path) -> bool:
    """Says whether something is there that a file must not take the place of: a device or a pipe."""
    return path.exists() and not path.is_file() and not path.is_dir()


def why_read_only(place: Path) -> str | None:
    """Says why a folder or a device can not be written to, as far as that is known before; None if it can.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     why_read_only(Path(folder)) is None
        True
    """
    if os.access(place, os.W_OK):
        return None
    locked = os.statvfs(place).f_flag & os.ST_RDONLY
    return os.strerror(errno.EROFS if locked else errno.EACCES).lower()


def _write_through(path: Path, write: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / path.name  # some formats go by the end of the name
        whole.touch()
        write(whole)
        with whole.open("rb") as file, path.open("wb") as out:
            shutil.copyfileobj(file, out)


def _start(path: Path) -> str:
    """Returns what the temporary name starts with: the name, or as much of it as leaves room for the rest.

    A name may have 255 bytes, and one that was cut has its hash in it: it is that of no other file.
    """
    name = os.fsencode(path.name)
    if len(name) + _MORE <= _LONGEST:
        return path.name
    return name[:100].decode(errors="ignore") + "." + hashlib.sha256(name).hexdigest()[:16]


def _remove_left(path: Path) -> None:
    with suppress(OSError):  # another process may do the same
        for left in path.parent.glob(f".{glob.escape(_start(path))}.{'[0-9a-f]' * 12}.tmp"):
            if time.time() - left.stat().st_mtime > _LEFT:
                left.unlink()
