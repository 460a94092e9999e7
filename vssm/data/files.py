"""Finds data files in the user's folder or the cache, downloads public ones, and reads them.

A file on disk is never replaced or deleted: a damaged file is named and left where it is.
"""

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Remote:
    """Names a public file: its address, its sha256, and its place in the cache."""

    url: str
    sha256: str
    file: str


def cache_folder() -> Path:
    """Returns the folder for downloads."""
    import pooch

    return Path(pooch.os_cache("vssm"))


def locate(
    names: Sequence[str], subfolders: Sequence[str], given: str | None, remote: Remote
) -> Path:
    """Returns the first of `names` found in the data folders, or else downloads it.

    A file may lie directly in a data folder (`given`, $VSSM_DATA, the cache) or in one of
    `subfolders`. Its content is not checked here.
    """
    folders = _data_folders(given)
    if found := _search(names, subfolders, folders):
        return found
    import pooch  # writes a temporary file, compares the checksum, then renames

    try:
        known = f"sha256:{remote.sha256}"
        return Path(pooch.retrieve(remote.url, known, fname=remote.file, path=cache_folder()))
    except (OSError, ValueError) as error:  # the errors of requests are OSErrors
        raise ValueError(
            f"found no {' or '.join(names)} in {' or '.join(map(str, folders))} (nor in"
            f" {', '.join(subfolders)} there), and {remote.url} could not be downloaded"
            f" ({' '.join(str(error).split())}); give the folder that holds it with --data-dir or"
            " $VSSM_DATA"
        ) from error


def locate_own(path: str, subfolder: str, given: str | None, folder: bool = False) -> Path:
    """Returns the user's file or folder: as given, or inside a data folder or its `subfolder`.

    If an absolute path does not exist, its last part is looked for in the data folders: configs
    that were made on another machine hold such paths.
    """
    own = Path(path).expanduser()
    is_there, kind = (Path.is_dir, "folder") if folder else (Path.is_file, "file")
    if is_there(own):
        return own
    if own.exists():
        raise ValueError(f"{path!r} is a {'file' if folder else 'folder'}; use a {kind}")
    folders = _data_folders(given)
    name = own.name if own.is_absolute() else str(own)
    if found := _search([name], [subfolder], folders, is_there):
        return found
    raise ValueError(
        f"found no {name} in the place given, nor in {' or '.join(map(str, folders))} (nor in"
        f" {subfolder} there); give its path, or the folder that holds it with --data-dir or"
        " $VSSM_DATA"
    )


def _data_folders(given: str | None) -> list[Path]:
    """Returns the folders to search: `given`, or else $VSSM_DATA; then the cache."""
    option, folder = ("--data-dir", given) if given else ("$VSSM_DATA", os.environ.get("VSSM_DATA"))
    if folder and not Path(folder).expanduser().is_dir():
        raise ValueError(f"{option} {folder!r} is not a folder")
    return [*([Path(folder).expanduser()] if folder else []), cache_folder()]


def _search(
    names: Sequence[str],
    subfolders: Sequence[str],
    folders: list[Path],
    is_there: Callable[[Path], bool] = Path.is_file,
) -> Path | None:
    """Returns the first of the names that lies in one of the folders or their subfolders."""
    places = (
        folder / sub / name for folder in folders for name in names for sub in ("", *subfolders)
    )
    return next(filter(is_there, places), None)


def read_bytes(path: Path) -> bytes:
    """Returns the content of a file; a .gz file is unpacked."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def read_numpy(path: Path) -> Any:  # noqa: ANN401
    """Returns the array of a .npy file, or the arrays of a .npz file by name; unpickles nothing."""
    content = io.BytesIO(read_bytes(path))
    try:
        file = np.load(content, allow_pickle=False)
        if isinstance(file, np.ndarray):
            return file
        return {name: np.asarray(file[name]) for name in file.files}
    except Exception:  # damaged files raise many kinds; NumPy's own words advise to unpickle
        raise ValueError(f"{path} is damaged or holds no plain arrays; use .npy or .npz") from None


def check_sha256(content: bytes, published: str, path: Path) -> None:
    """Raises a ValueError that names both checksums if they differ."""
    found = hashlib.sha256(content).hexdigest()
    if found != published:
        raise ValueError(
            f"{path} has content with sha256 {found}, but the published one is {published};"
            " move the file away to download it again, or give another folder with --data-dir"
        )
