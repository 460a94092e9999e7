"""The shipped models: their files are whole, and damage is noticed."""

import shutil

import pytest

from vssm import load
from vssm.runs.pretrained import find, names


@pytest.mark.parametrize("name", names())
def test_damaged_weights_of_shipped_models_are_refused(name, tmp_path):
    assert load(name).config == load(find(name)).config
    folder = shutil.copytree(find(name), tmp_path / name)
    weights = folder / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1000] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match="differs from its checksum"):
        load(folder)
