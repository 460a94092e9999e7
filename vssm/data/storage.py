"""Files that are either whole or absent, and tensors that carry a checksum.

A file is written under a temporary name, flushed to the disk, and renamed.
"""

import errno
import json
import os
import secrets
import tempfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_CHECKSUM = "crc32"  # its key in the metadata of a safetensors file
_ADVICE = "restore it from a copy"


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a temporary path in the same folder, then renames the file to `path`.

    A reader finds the old file or the new one, never half of one. If `write` fails, the old file
    stays. Devices and pipes, such as /dev/null, are written to directly.
    """
    path = Path(path)
    if not path.name:
        raise ValueError(f"path={str(path)!r} is not a file name; give the name of a file")
    if is_device(path):
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder) / path.name  # some formats are chosen by the end of the name
            write(whole)
            path.write_bytes(whole.read_bytes())
        return
    # A name has at most 255 bytes, and a character at most 4.
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(6)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)  # some libraries make files that only their owner can read
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)  # the rename must reach the disk too
    except (OSError, SafetensorError) as error:  # name the file that the user knows
        if not isinstance(error, OSError) or error.errno is None:
            raise OSError(f"{str(path)!r} could not be written: {error}") from None
        if error.filename not in (None, str(temporary)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):  # the first error is the one that the user must see
            temporary.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Makes a file, or the names in a folder, reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_object(path: Path, text: str | None = None) -> dict[str, Any]:
    """Returns the JSON object in a file, or in a text of it; raises `ValueError` for damage."""
    try:
        values = json.loads(path.read_bytes() if text is None else text)
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}; {_ADVICE}") from None
    return values


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors and metadata to a safetensors file, atomically and with a checksum."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    marked = with_checksum(whole, metadata or {})
    write_atomically(path, lambda file: safetensors.torch.save_file(whole, file, marked))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors and the metadata of a safetensors file, checked against its checksum."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}; {_ADVICE}") from None
    check_checksum(repr(str(path)), tensors, metadata)
    return tensors, metadata


def with_checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Returns the metadata with a checksum of the metadata and the CPU tensors."""
    return {**metadata, _CHECKSUM: _checksum(tensors, metadata)}


def check_checksum(name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Raises `ValueError` if content differs from its checksum; old files have none and pass."""
    rest = dict(metadata)
    found = rest.pop(_CHECKSUM, None)
    if found is not None and found != _checksum(tensors, rest):
        raise ValueError(f"{name} is damaged: it differs from its checksum; {_ADVICE}")


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Returns the CRC-32 of metadata and of CPU tensors with their names, dtypes and shapes."""
    total = 0
    for key, value in sorted(metadata.items()):
        total = zlib.crc32(f"{key}={value}\n".encode(), total)
    for key, tensor in sorted(tensors.items()):
        total = zlib.crc32(f"{key}={tensor.dtype}{tuple(tensor.shape)}\n".encode(), total)
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        total = zlib.crc32(content.numpy().data, total)
    return f"{total:08x}"


def check_folder(name: str, folder: Path) -> None:
    """Raises unless a folder is there or can be made, and can be written to."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    if not there.is_dir():
        raise ValueError(
            f"{name}={str(folder)!r} is a file or lies below one; use a folder, or a new name"
        )
    if why := why_read_only(there):
        raise ValueError(f"{name}={str(folder)!r} cannot be written: {why}")


def is_device(path: Path) -> bool:
    """Returns whether a path is a device or a pipe, which a file must not replace."""
    return path.exists() and not path.is_file() and not path.is_dir()


def why_read_only(place: Path) -> str | None:
    """Returns why a folder or device cannot be written to, or None if it can."""
    if os.access(place, os.W_OK):
        return None
    locked = os.statvfs(place).f_flag & os.ST_RDONLY
    return os.strerror(errno.EROFS if locked else errno.EACCES).lower()
