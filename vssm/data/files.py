"""Finds data files in the user's folder or the cache, downloads public ones, and reads them.

A file on disk is never replaced or deleted: a damaged file is named and left where it is.
"""

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vssm.data.config import DataConfig


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
    name: str, subfolders: Sequence[str], given: str | None, remote: Remote, unpack: bool = False
) -> Path:
    """Returns the file `name` if it is in the data folders, or else downloads it.

    A file may lie directly in a data folder (`given`, $VSSM_DATA, the cache) or in one of
    `subfolders`. Its content is not checked here. If `unpack`, the download is an archive with the
    file in it.
    """
    places = _places(name, subfolders, given)
    if found := next(filter(Path.is_file, places), None):
        return found
    import pooch  # writes a temporary file, compares the checksum, then renames

    known, place = f"sha256:{remote.sha256}", {"fname": remote.file, "path": cache_folder()}
    try:
        if not unpack:
            return Path(pooch.retrieve(remote.url, known, **place))
        paths = map(Path, pooch.retrieve(remote.url, known, processor=pooch.Untar(), **place))
        return next(path for path in paths if path.name == name)
    except (OSError, ValueError) as error:  # the errors of requests are OSErrors
        raise ValueError(
            f"found no {name} as {' or '.join(map(str, places))}, and {remote.url} could not be"
            f" downloaded ({' '.join(str(error).split())}); give the folder that holds it with"
            " --data-dir or $VSSM_DATA"
        ) from error


def locate_own(config: DataConfig) -> Path:
    """Returns the user's file, or folder of images: as given, or inside a data folder.

    If an absolute path does not exist, its last part is looked for in the data folders: configs
    that were made on another machine hold such paths.
    """
    path = getattr(config, config.name).path
    is_there, kind = Path.is_file, "file"
    if config.name == "images":
        is_there, kind = Path.is_dir, "folder of images"
    if path is None:
        raise ValueError(f"{config.name}.path is needed: a {kind}")
    own = Path(path).expanduser()
    if is_there(own):
        return own
    if own.exists():
        raise ValueError(f"{path!r} is a {'folder' if own.is_dir() else 'file'}; use a {kind}")
    name = own.name if own.is_absolute() else str(own)
    subfolder = "timeseries" if config.name == "series" else config.name
    places = _places(name, [subfolder], config.dir)
    if found := next(filter(is_there, places), None):
        return found
    raise ValueError(
        f"found no {name} in the place given, nor as {' or '.join(map(str, places))}; give its"
        " path, or the folder that holds it with --data-dir or $VSSM_DATA"
    )


def _places(name: str, subfolders: Sequence[str], given: str | None) -> list[Path]:
    """Returns where a file may lie: in `given`, or else $VSSM_DATA; then in the cache."""
    option, folder = ("--data-dir", given) if given else ("$VSSM_DATA", os.environ.get("VSSM_DATA"))
    if folder and not Path(folder).expanduser().is_dir():
        raise ValueError(f"{option} {folder!r} is not a folder")
    folders = [*([Path(folder).expanduser()] if folder else []), cache_folder()]
    return [folder / sub / name for folder in folders for sub in ("", *subfolders)]


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
        problem = "is damaged or does not hold plain arrays"
        raise ValueError(f"{path} {problem}; use .npy or .npz") from None


def read_published(path: Path, sha256: str) -> bytes:
    """Returns the content of a public file; raises unless it has the published checksum."""
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(
            f"{path} has content with sha256 {found}, but the published one is {sha256};"
            " move the file away to download it again, or give another folder with --data-dir"
        )
    return content
