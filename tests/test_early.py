"""Kernels that start early: they touch nothing before what they read is there."""

import pytest
import torch

from tests.conftest import small_model
from tests.interpreter import INTERPRETED
from vssm import generate

pytestmark = pytest.mark.skipif(INTERPRETED, reason="it compiles kernels")


def compiled(kernel, pointers, numbers, **constants):
    """Returns the PTX of a kernel for compute capability 9.0, which needs no GPU."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict.fromkeys(pointers, "*fp32") | dict.fromkeys(numbers, "i32")
    types |= {"z": "*i64", "eps": "fp32"}
    given = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {name: constants.get(name) for name, kind in given.items() if kind == "constexpr"}
    source = ASTSource(fn=kernel, signature=given, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


def products():
    from vssm.ops import linear_triton as module

    pointers, numbers = ["x", "weight", "scale", "squares", "y"], ["M", "N", "K", "depth", "stride"]
    tile = {"BM": 16, "BN": 16, "BK": 64, "HALF": True, "GROUP": 8}
    yield module._tile_kernel, pointers, numbers, tile
    yield module._row_kernel, ["x", "weight", "scale", "y"], ["N", "K"], {"BN": 2, "BK": 1024}


def others():
    from vssm.ops import conv_triton, embed_triton, linear_triton

    pointers, numbers = ["partial", "squares", "y"], ["total", "N", "K"]
    yield linear_triton._sum_kernel, pointers, numbers, {"SPLIT": 2, "BLOCK": 256}
    pointers, numbers = ["weight", "y"], ["steps", "N", "D"]
    yield embed_triton._kernel, pointers, numbers, {"Z": 32, "BR": 1, "BZ": 32, "BD": 128}
    pointers = ["x", "weight", "bias", "y", "after"]
    numbers = ["row", "stride", "T", "channels", "chunks", "share"]
    yield conv_triton._forward_kernel, pointers, numbers, {"K": 4, "CHUNK": 4, "BLOCK": 128}


@pytest.mark.parametrize("kernels", [products, others])
def test_nothing_is_touched_before_the_wait(kernels):
    pytest.importorskip("triton")
    for kernel, pointers, numbers, constants in kernels():
        code = compiled(kernel, pointers, numbers, EARLY=True, **constants)
        before, wait, after = code.partition("griddepcontrol.wait")
        assert wait and "griddepcontrol.launch_dependents" in before
        assert ("prefetch.global.L2" in before) == (kernels is products), "weights are there before x is"
        for touch in ("ld.global", "st.global", "cp.async"):
            assert touch not in before
        assert "ld.global" in after or "cp.async" in after
        assert "griddepcontrol" not in compiled(kernel, pointers, numbers, EARLY=False, **constants)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [(1, 28), (3, 100), (16, 28)], ids=str)
@pytest.mark.parametrize("kind", ["vssm", "ssm", "rnn"])
def test_results_do_not_depend_on_it(kind, rows, monkeypatch):
    """Over many seeds, since what is read too early is mostly right."""
    from vssm.ops import early_triton

    num, length = rows
    early, late = small_model(kind, width=512).to("cuda"), small_model(kind, width=512).to("cuda")
    for seed in range(30):
        made = generate(early, num=num, length=length, seed=seed)
        with monkeypatch.context() as patch:
            patch.setattr(early_triton, "EARLY", False)
            wanted = generate(late, num=num, length=length, seed=seed)
        assert torch.equal(made.x, wanted.x)
        for a, b in zip(made.state.leaves(), wanted.state.leaves(), strict=True):
            assert torch.equal(a, b)
