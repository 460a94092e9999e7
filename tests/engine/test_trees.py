"""Trees of static tensors are copied in few launches, into memory of their own."""

import pytest
import torch

from vssm import State
from vssm.engine import trees
from vssm.engine.trees import ResultTree


def memory(*tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


def test_a_copy_has_the_values_types_and_strides_of_the_tree():
    many = torch.arange(4.0).expand(5, 4)
    tree = State(
        {
            "inner": State({"a": torch.ones(3), "b": State({"c": many, "d": torch.tensor(7)})}),
            "x": torch.ones(2, 3).T,
            "none": torch.empty(0, 2),
            "half": torch.ones(3, dtype=torch.bfloat16),
            "one": State({"e": torch.zeros(2)}),
        }
    )
    tree.children["twice"] = tree["x"]
    output = ResultTree(tree)
    first, second = output.copy(9), output.copy(9)
    for made in (first, second):
        for a, b in zip(made.leaves(), tree.leaves(), strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype
    assert first.child("inner").child("b")["c"].stride() == (0, 1)
    assert first.child("inner").child("b").position == first.position == 9
    assert first["x"].data_ptr() != first["twice"].data_ptr()
    assert memory(*first.leaves()).isdisjoint(memory(*second.leaves(), *tree.leaves()))
    assert len(memory(first["x"], first["twice"])) == 1
    assert len(memory(first["x"], first.child("inner")["a"], first.child("one")["e"])) == 3


def test_a_large_tensor_gets_memory_of_its_own(monkeypatch):
    monkeypatch.setattr(trees, "_LARGE", 64)
    made = ResultTree(State({"x": torch.ones(16), "y": torch.ones(2), "z": torch.ones(2)})).copy(1)
    assert len(memory(made["x"], made["y"])) == 2 and len(memory(made["y"], made["z"])) == 1


@pytest.mark.parametrize("start", [0, 1])
def test_tensors_of_any_size_are_joined(start):
    long, single, half = torch.arange(64), torch.arange(5.0), torch.ones(3, dtype=torch.bfloat16)
    for tensors in (
        (long, single),
        (single, half),
        (half, torch.tensor([True])),
        (long[:0], half[:0]),
    ):
        tree = State({str(i): tensor[start:] for i, tensor in enumerate(tensors)})
        for made, expected in zip(ResultTree(tree).copy(1).leaves(), tree.leaves(), strict=True):
            assert torch.equal(made, expected) and made.dtype == expected.dtype
