"""Every public name explains itself, with an example; `pytest vssm` runs the examples."""

import inspect

import pytest

import vssm
from vssm import ops

NAMES = {name: getattr(vssm, name) for name in vssm.__all__ if name != "ops"}
NAMES |= {f"ops.{name}": value for name, value in vars(ops).items() if inspect.isfunction(value)}


@pytest.mark.parametrize("name", NAMES)
def test_public_names_have_an_example(name):
    assert ">>> " in (inspect.getdoc(NAMES[name]) or "")


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isclass(NAMES[name])])
def test_methods_of_public_classes_say_what_they_do(name):
    members = [key for key in vars(NAMES[name]) if not key.startswith("_")]
    silent = [key for key in members if not inspect.getdoc(getattr(NAMES[name], key, None))]
    assert not [key for key in silent if callable(getattr(NAMES[name], key))]
