"""Text becomes tokens and comes back."""

import gzip

import pytest
import torch

from tests.data.opening import REAL, real, refused, text
from vssm.data import DataConfig, open_data


def test_text_is_split_by_position_into_windows(tmp_path):
    content = "".join(chr(97 + k % 26) for k in range(1003))
    (tmp_path / "a.txt").write_text(content)
    data = open_data(text(tmp_path / "a.txt", length=7))
    assert data.meta.features == 26 and data.meta.vocabulary == "abcdefghijklmnopqrstuvwxyz"
    assert data.train.x.dtype == torch.uint8
    starts = {"train": 0, "valid": 813, "test": 903}
    for split, start in (
        (data.train, 0),
        (data.valid, starts["valid"]),
        (data.test(), starts["test"]),
    ):
        joined = "".join(data.meta.decode(tokens) for tokens in split.batch(slice(None)))
        assert joined == content[start : start + len(joined)]
    assert (len(data.train), len(data.valid), len(data.test())) == (813 // 7, 90 // 7, 100 // 7)


@pytest.mark.parametrize("unit", ["char", "byte"])
def test_text_decodes_what_it_encodes(tmp_path, unit):
    content = "héllo ∅ — 統計 🙂\r\n" * 40
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content.encode()))
    meta = open_data(text(tmp_path / "a.txt.gz", unit=unit, length=8)).meta
    assert meta.decode(meta.encode("統計 ∅🙂")) == "統計 ∅🙂"
    assert meta.features == (256 if unit == "byte" else len(set(content)))
    if unit == "char":
        with pytest.raises(ValueError, match="'z'"):
            meta.encode("zello")


def test_large_vocabulary_is_stored_in_two_bytes(tmp_path):
    content = "".join(map(chr, range(0x4E00, 0x4E00 + 1000))) * 3
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    data = open_data(text(tmp_path / "a.txt", length=100))
    assert data.train.x.dtype == torch.int16
    assert data.meta.decode(data.train.batch([3])[0]) == content[300:400]


def test_bad_text_is_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good " * 20 + b"\xff bad " * 20)
    refused(text(path, length=2), path, "byte 100", "0xff", "--text.unit byte")
    assert open_data(text(path, length=2, unit="byte")).meta.features == 256
    path.write_bytes(b"")
    refused(text(path), path, "0 tokens", "256")
    path.write_text("short " * 40)
    refused(text(path), path, "240 tokens", "text.length = 256")
    refused(text("nowhere.txt"), "nowhere.txt")


def test_a_byte_order_mark_is_no_character(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat " * 40, encoding="utf-8-sig")
    assert "\ufeff" not in open_data(text(tmp_path / "a.txt", length=8)).meta.vocabulary


@real("text/tinyshakespeare.txt", "tinyshakespeare.txt")
def test_tinyshakespeare_has_65_characters():
    data = open_data(DataConfig(name="text", dir=REAL))
    assert data.meta.features == 65
    assert data.meta.decode(data.train.batch([0])[0]).startswith(
        "First Citizen:\nBefore we proceed any further"
    )
