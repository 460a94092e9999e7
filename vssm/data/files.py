"""Finds data files in the user's folder or the cache, downloads public ones, and reads them checked.

Nothing that lies on disk is ever replaced or deleted: a damaged file is named and left where it is. A small
packed file can unpack to more than the memory holds, so unpacking stops at `MOST_UNPACKED` bytes.
"""

import gzip
import hashlib
import os
import tokenize
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# What numpy raises where a .npy file is damaged: the last two come from the parser of its header.
DAMAGED_NPY = (ValueError, EOFError, MemoryError, SyntaxError, tokenize.TokenError)


MOST_UNPACKED = 4 << 30  # bytes that a .gz, .npz or Parquet file may unpack to
_PIECE = 1 << 20  # bytes that are unpacked at once


@dataclass(frozen=True)
class Remote:
    """Names a public file: its address, the sha256 of the file itself, and its place in the cache."""

    url: str
    sha256: str
    file: str


def cache_folder() -> Path | None:
    """Returns the folder for downloads, or None without pooch: then nothing was ever downloaded."""
    try:
        import pooch
    except ImportError:
        return None
    return Path(pooch.os_cache("vssm"))


def data_folders(given: str | None) -> list[Path]:
    """Returns the folders to search: `given` or $VSSM_DATA when there is one, then the cache."""
    option, folder = ("--data-dir", given) if given else ("$VSSM_DATA", os.environ.get("VSSM_DATA"))
    if folder and not Path(folder).expanduser().is_dir():
        raise ValueError(f"{option} {folder!r} is not a folder")
    return [Path(f).expanduser() for f in (folder, cache_folder()) if f]


def locate(
    names: Sequence[str],
    subfolders: Sequence[str],
    given: str | None,
    remote: Remote | None = None,
    own: bool = False,
) -> Path:
    """Returns the first file found in the data folders, else downloads it.

    Arguments:
        names: Names of the file, in order of preference.
        subfolders: Where in a data folder it may lie besides directly.
        given: The `dir` option.
        remote: Where the file can be had, if anywhere.
        own: Whether it is a file of the user that was looked for as given before; only messages tell it.

    Returns:
        The path of a file that exists. Its content is not checked here.
    """
    folders = data_folders(given)
    for folder in folders:
        for name in names:
            for place in (folder, *(folder / sub for sub in subfolders)):
                if (place / name).is_file():
                    return place / name
    places = " or ".join(map(str, folders)) or "any folder"
    places = f"the place given, nor in {places}" if own else places
    missing = f"found no {' or '.join(names)} in {places} (nor in {', '.join(subfolders)} there)"
    advice = "give the folder that holds it with --data-dir or $VSSM_DATA"
    advice = f"give its path, or {advice.removeprefix('give ')}" if own else advice
    if remote is None:
        raise ValueError(f"{missing}; {advice}")
    try:
        return _download(remote)
    except (ImportError, OSError, ValueError) as error:  # the errors of requests are OSErrors
        cause: BaseException = error
        while (
            cause.__context__ is not None
        ):  # requests wraps the one that tells something three times
            cause = cause.__context__
        reason = " ".join(str(cause).split())
        raise ValueError(
            f"{missing}, and {remote.url} could not be downloaded ({reason}); {advice}"
        ) from error


def _download(remote: Remote) -> Path:
    import pooch  # writes a temporary file, compares the checksum, then renames

    folder = cache_folder()
    assert folder is not None
    if (
        folder / remote.file
    ).is_file():  # another process was quicker; pooch would replace a damaged file
        return folder / remote.file
    return Path(
        pooch.retrieve(remote.url, f"sha256:{remote.sha256}", fname=remote.file, path=folder)
    )


def locate_own(path: str, subfolder: str, given: str | None) -> Path:
    """Returns the user's file `path`, as it is or inside the data folder (or its `subfolder`)."""
    own = Path(path).expanduser()
    if own.is_dir():
        raise ValueError(f"{path!r} is a folder; allowed: a file")
    return own if own.is_file() else locate((_inside(own),), (subfolder,), given, own=True)


def locate_folder(path: str, subfolder: str, given: str | None) -> Path:
    """Returns the user's folder `path`, as it is or inside the data folder (or its `subfolder`)."""
    own = Path(path).expanduser()
    if own.is_file():
        raise ValueError(f"{path!r} is a file; allowed: a folder")
    if own.is_dir():
        return own
    folders = data_folders(given)
    for place in (place for folder in folders for place in (folder, folder / subfolder)):
        if (place / _inside(own)).is_dir():
            return place / _inside(own)
    places = " or ".join(map(str, folders)) or "any data folder"
    raise ValueError(
        f"{path!r} is not a folder, nor is there one of that name in {places} (nor in {subfolder} there);"
        " give its path, or the folder that holds it with --data-dir or $VSSM_DATA"
    )


def _inside(path: Path) -> str:
    """Returns what to look for in a data folder: of an absolute path, as another machine has it, the name."""
    return path.name if path.is_absolute() else str(path)


def check_unpacked(size: int, path: Path) -> None:
    """Raises a ValueError when a packed file unpacks to more than `MOST_UNPACKED` bytes."""
    if size > MOST_UNPACKED:
        raise ValueError(
            f"{path} unpacks to more than the {MOST_UNPACKED / 2**30:g} GiB allowed for a packed file;"
            " unpack it yourself (a plain .npy, CSV or text file has no limit), or take fewer rows"
        )


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """Returns the content of a file, at most `limit` bytes of it, unpacked when its name ends in .gz."""
    packed = path.suffix == ".gz"
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            if limit is not None or not packed:
                return file.read(-1 if limit is None else limit)
            parts, size = [], 0
            while part := file.read(_PIECE):
                size += len(part)
                check_unpacked(size, path)
                parts.append(part)
            return b"".join(parts)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def check_sha256(content: bytes, published: str, path: Path) -> None:
    """Raises a ValueError that names both checksums when `content` does not have the published one."""
    found = hashlib.sha256(content).hexdigest()
    if found != published:
        raise ValueError(
            f"{path} has content with sha256 {found}, the published one is {published};"
            " move the file away to download it again, or give another folder with --data-dir"
        )
