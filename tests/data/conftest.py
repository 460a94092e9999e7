"""Every test opens data sets with an empty cache; small public data sets are made here."""

import gzip
import http.server
import struct
import threading

import numpy as np
import pytest

from tests.data.opening import sha256
from vssm.data import files, images


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    """Every test has its own empty cache, and no data folder but the one it names."""
    monkeypatch.delenv("VSSM_DATA", raising=False)
    monkeypatch.setattr(files, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path


@pytest.fixture
def server(tmp_path):
    """Serves tmp_path/site on this machine and gives its address."""
    (tmp_path / "site").mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(tmp_path / "site"))

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


def idx(array):
    return (
        bytes((0, 0, 8, array.ndim))
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


@pytest.fixture
def mnist(tmp_path, monkeypatch):
    """Writes four small packed IDX files and publishes their checksums; gives their folder."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    rng = np.random.default_rng(0)
    published = {}
    for name in images.MNIST:
        num = 50 if name.startswith("train") else 20
        array = rng.integers(
            0, 256 if "images" in name else 10, (num, 28, 28)[: 3 if "images" in name else 1]
        )
        content = gzip.compress(idx(array.astype(np.uint8)), mtime=0)
        (folder / f"{name}.gz").write_bytes(content)
        published[name] = sha256(content)
    monkeypatch.setattr(images, "MNIST", published)
    return folder


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """Writes six batches of 20 records and publishes their checksums; gives the folder above."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    rng = np.random.default_rng(0)
    published = {}
    for name in images.CIFAR10:
        records = rng.integers(0, 256, (20, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())
        published[name] = sha256(records.tobytes())
    monkeypatch.setattr(images, "CIFAR10", published)
    return tmp_path
