"""Opens data sets in tests, in few words."""

import csv
import hashlib
import os
from pathlib import Path

import pytest

from vssm.data import ArraysConfig, DataConfig, SeriesConfig, TextConfig, open_data

REAL = os.environ.get("VSSM_DATA")


def refused(config, *parts):
    """Opens a data set, checks that one line names all `parts`, and returns the line."""
    with pytest.raises(ValueError) as caught:
        data = open_data(config() if callable(config) else config)
        _ = data.train, data.test()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message, message
    return message


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def series(path, **options):
    return DataConfig(name="series", series=SeriesConfig(path=str(path), **options))


def text(path, **options):
    return DataConfig(name="text", text=TextConfig(path=str(path), **options))


def arrays(path, **options):
    return DataConfig(name="arrays", arrays=ArraysConfig(path=str(path)), **options)


def write_csv(path, rows, header=None):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header] * (header is not None) + list(rows))
    return path


def real(*names):
    """Marks a test that needs the real files of a data set."""
    found = [Path(REAL, name) for name in names if REAL and Path(REAL, name).exists()]
    return pytest.mark.skipif(not found, reason=f"needs $VSSM_DATA with {' or '.join(names)}")
