"""Trees of static tensors are copied in few launches, into memory of their own."""

import torch

from vssm import State
from vssm.engine.trees import compact, duplicate


def memory(*tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


def test_a_copy_has_the_values_and_types_of_the_tree():
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
    static = compact(tree)
    first, second = duplicate(static, 9), duplicate(static, 9)
    for made in (first, second):
        for a, b in zip(made.leaves(), tree.leaves(), strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype
    assert first.child("inner").child("b")["c"].stride() == (0, 1), "shared rows stay shared"
    assert first.child("inner").child("b").position == first.position == 9
    assert memory(*first.leaves()).isdisjoint(memory(*second.leaves(), *static.leaves()))
    assert len(memory(*first.leaves())) == 7, "who keeps one tensor does not keep another"
