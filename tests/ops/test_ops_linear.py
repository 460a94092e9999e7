"""Products for generation equal PyTorch's: interpreted without a GPU, compiled with one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conftest import relative_error, small_model
from tests.interpreter import (
    DEVICE,
    kernels,
    needs_interpreter,
    run_interpreted,
)
from vssm import generate
from vssm.nn import GRUBlock
from vssm.nn.stack import Linear, RMSNorm, apply_in_halves
from vssm.ops import linear as linear_module
from vssm.ops.linear import PackedWeight, linear

SINGLE = 2e-6  # relative, in norm, against float64


@needs_interpreter
def test_in_the_interpreter():
    run_interpreted(__file__)


def normal(*shape, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(DEVICE, torch.float32)


def by_kernels(*arguments, **options):
    from vssm.ops.linear import triton

    return triton.linear(*arguments, **options)


def rms_norm(width):
    norm = RMSNorm(width, eps=1e-5).to(DEVICE)
    with torch.no_grad():
        norm.weight.copy_(normal(width, seed=5) + 1)
    return norm


def exact(x, weight, bias=None, add=None, norm=None):
    """The same in float64."""
    x, weight = x.double(), weight.double()
    if norm is not None:
        x = F.rms_norm(x, norm.weight.shape, norm.weight.double(), norm.eps)
    y = F.linear(x, weight, None if bias is None else bias.double())
    return y if add is None else y + add.double()


# Rows, columns and depth: one row; few rows with and without parts; more; tiles that are not full.
SIZES = [
    (1, 7, 64),
    (1, 40, 96),
    (3, 20, 64),
    (17, 33, 96),
    (28, 96, 512),
    (30, 1030, 256),
    (64, 5, 256),
    (70, 100, 64),
    (70, 40, 128),
    (130, 70, 96),
]


@kernels
@pytest.mark.parametrize("size", SIZES, ids=str)
@torch.no_grad()
def test_matches_float64(size):
    M, N, K = size
    x, weight, bias, add = (
        normal(M, K),
        normal(N, K, seed=1),
        normal(N, seed=2),
        normal(M, N, seed=3),
    )
    assert relative_error(by_kernels(x, weight), exact(x, weight)) < SINGLE
    given = by_kernels(x, weight, bias, add, rms_norm(K))
    assert given.dtype == torch.float32
    assert relative_error(given, exact(x, weight, bias, add, rms_norm(K))) < SINGLE


@kernels
@pytest.mark.parametrize("rows", [1, 5, 66])
@torch.no_grad()
def test_rows_of_any_scale(rows):
    """A row that is small next to the others is as accurate as they are; zeros are exact."""
    x, weight = normal(rows, 128), normal(24, 128, seed=1)
    x *= torch.logspace(-12, 12, rows).to(DEVICE)[:, None]
    weight *= torch.logspace(-12, 12, 24).to(DEVICE)[:, None]
    weight[7] = 0
    given, wanted = by_kernels(x, weight), exact(x, weight)
    assert (given[:, 7] == 0).all()
    scale = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    assert ((given - wanted).abs() <= SINGLE * scale).all()


@kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@torch.no_grad()
def test_what_is_not_finite_stays_so():
    from vssm.ops.linear.triton import Plan

    x, weight = normal(3, 64), normal(20, 64, seed=1)
    x[1, 5], x[2, 6] = float("inf"), float("nan")
    for how in (None, *(Plan(16, 16, 32, 1, 4, 2, method) for method in ("tf32", "float32"))):
        given = by_kernels(x, weight, how=how)
        assert torch.isfinite(given[0]).all()
        assert not torch.isfinite(given[1:]).any()
        assert not torch.isfinite(by_kernels(weight, x, how=how)[:, 1:]).any()


@kernels
@torch.no_grad()
def test_leading_dimensions_and_strides():
    whole, weight = normal(2, 3, 96), normal(20, 64, seed=1)
    for x in (
        whole[..., 32:],
        whole[:, ::2, :64],
        whole[0, 0, :64],
        normal(64, 2, 3).movedim(0, -1),
    ):
        given = by_kernels(x, weight)
        assert given.shape == (*x.shape[:-1], 20) and given.is_contiguous()
        assert relative_error(given, exact(x, weight)) < SINGLE
    add = normal(20, 2, 3).movedim(0, -1)
    given = by_kernels(whole[..., :64], weight, add=add)
    assert relative_error(given, exact(whole[..., :64], weight, add=add)) < SINGLE
    assert by_kernels(whole[:0, :, :64], weight).shape == (0, 3, 20)
    bias = normal(20, 2, seed=2)[:, 1]
    for x in (whole[0, :1, :64], whole[..., :64]):
        given = by_kernels(x, weight, bias)
        assert relative_error(given, exact(x, weight, bias)) < SINGLE


@kernels
@pytest.mark.parametrize("method", ["tf32", "float16", "float32"])
@torch.no_grad()
def test_every_method(method):
    """Each with and without parts of K, a norm, and rows, columns and K that no tile divides."""
    from vssm.ops.linear.triton import Plan

    whole, weight, bias, add = (
        normal(37, 224),
        normal(21, 192, seed=1),
        normal(21, seed=2),
        normal(37, 21, seed=3),
    )
    x, norm = whole[:, 32:], rms_norm(192)
    x *= torch.logspace(-3, 3, 37).to(DEVICE)[:, None]
    for parts in (1,) if method == "float32" else (1, 3):
        how = Plan(16, 16, 32, parts, 4, 2, method)
        given = by_kernels(x, weight, bias, add, norm, how)
        assert relative_error(given, exact(x, weight, bias, add, norm)) < SINGLE
        given = by_kernels(x, weight, how=how)
        scale = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
        assert ((given - exact(x, weight)).abs() <= SINGLE * scale).all()


@kernels
@torch.no_grad()
def test_a_packed_weight_gives_the_same_products():
    """Its halves are made when a product first reads them, and kept."""
    from vssm.ops.linear.triton import Plan

    how = Plan(16, 16, 32, 1, 4, 2, "float16")
    x, weight, made = normal(5, 64), normal(20, 64), []
    packed = PackedWeight(weight)
    wanted = by_kernels(x, weight, how=how)
    for _ in range(2):
        assert torch.equal(by_kernels(x, packed, how=how), wanted)
        made.append(packed.halves(lambda weight: pytest.fail("they are kept")))
    assert made[0] is made[1]
    assert relative_error(wanted, exact(x, weight)) < SINGLE
    for rows in (1, 5, 66):
        x, add = normal(rows, 64), normal(rows, 20, seed=2)
        given = by_kernels(x, packed, None, add, rms_norm(64))
        assert torch.equal(given, by_kernels(x, weight, None, add, rms_norm(64)))


@pytest.mark.gpu
@torch.no_grad()
def test_halves_that_a_cuda_graph_makes_are_not_kept():
    weight, x = normal(512, 512), normal(400, 512, seed=1)
    packed, graph = PackedWeight(weight), torch.cuda.CUDAGraph()
    wanted = linear(x, weight)  # compiles the kernels
    with torch.cuda.graph(graph):
        given = linear(x, packed)
    graph.replay()
    assert torch.equal(given, wanted)
    del graph
    assert torch.equal(linear(x, packed), wanted)


def test_a_packed_weight_on_a_cpu_is_the_weight():
    weight, x, add = torch.rand(8, 64), torch.rand(5, 64), torch.rand(5, 8)
    packed, norm = PackedWeight(weight.T.contiguous().T), RMSNorm(64, eps=1e-5)
    assert packed.weight.is_contiguous() and not packed.weight.requires_grad
    wanted = F.linear(norm(x), weight)
    assert torch.equal(linear(x, packed, norm=norm), wanted)
    assert torch.equal(linear(x, packed, add=add, norm=norm), add + wanted)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_layer_in_halves_is_the_layer(device):
    layer, x = Linear(32, 16, bias=False).to(device), torch.rand(5, 32, device=device)
    calls, wanted = [], layer(x)
    for _ in range(2):
        given = torch.cat(apply_in_halves(layer, x), -1)
        assert relative_error(given, wanted) < SINGLE
        (grad,) = torch.autograd.grad(given.square().sum(), layer.weight)
        (expected,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
        assert relative_error(grad, expected) < SINGLE
        calls.clear()
        layer.register_forward_hook(lambda *_: calls.append(1))  # it is called as it is, then
    apply_in_halves(layer, x)
    assert calls


@kernels
def test_plans_cover_the_depth():
    from vssm.ops.linear.triton import plan

    for N, K in ((4096, 1024), (96, 2048), (2048, 64), (28, 1024), (40, 96), (7, 160), (600, 544)):
        for M in (1, 2, 16, 28, 64, 65, 448, 1024, 28672, 200_000):
            for shared in (227 * 1024, 99 * 1024):
                how = plan(M, N, K, shared)
                assert K % (how.SPLIT * how.BK) == 0 and (32 if M > 1 else 1) <= how.BK
                assert how.SPLIT == 1 or K // how.SPLIT >= 64
                assert how.stages >= (1 if how.method == "float32" else 2)
                assert M == 1 or 4 * how.stages * how.BK * (how.BM + how.BN) <= shared


def test_auto_is_pytorch_where_it_must_be():
    layer, x, add = Linear(64, 8), torch.rand(5, 64), torch.rand(5, 8)
    norm = RMSNorm(64, eps=1e-5)
    wanted = F.linear(norm(x), layer.weight, layer.bias) + add
    assert torch.equal(linear(x, layer.weight, layer.bias, add, norm), wanted)
    with torch.no_grad():
        assert torch.equal(linear(x, layer.weight, layer.bias, add, norm), wanted)
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert isinstance(layer, nn.Linear)


MODEL = [
    *((28, N, K) for N, K in ((4096, 1024), (96, 2048), (2048, 64), (1024, 2048), (28, 1024))),
    *((56, N, K) for N, K in ((4096, 1024), (96, 2048), (1024, 2048))),
    *((1, 4096, 1024), (16, 3072, 1024), (448, 1024, 2048), (1024, 4096, 1024), (3584, 96, 2048)),
    *((100_000, 256, 64), (100_000, 36, 128)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("size", MODEL, ids=str)
@torch.no_grad()
def test_real_sizes_are_accurate_and_repeat(size):
    M, N, K = size
    x, weight, bias, add = (
        normal(M, K),
        normal(N, K, seed=1),
        normal(N, seed=2),
        normal(M, N, seed=3),
    )
    first, second = (linear(x, weight, bias, add, rms_norm(K)) for _ in range(2))
    assert torch.equal(first, second)
    wanted = exact(x, weight, bias, add, rms_norm(K))
    assert relative_error(first, wanted) < SINGLE
    positive = exact(
        x.abs(), weight.abs()
    )  # sums that grow, where every cut-off bit has the same sign
    twin = relative_error(F.linear(x.abs(), weight.abs()), positive)
    assert relative_error(by_kernels(x.abs(), weight.abs()), positive) < max(SINGLE, 2 * twin)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["vssm", "ssm", "rnn", "vrnn", "transformer", "tvae"])
def test_generation_is_the_same_without(kind, monkeypatch):
    model = small_model(kind, width=64).to("cuda")
    ran, runs = [], linear_module._runs_kernels
    monkeypatch.setattr(
        linear_module, "_runs_kernels", lambda *given: ran.append(runs(*given)) or ran[-1]
    )
    given = generate(model, num=3, length=9, seed=1)
    assert any(ran)
    monkeypatch.setattr(linear_module, "_runs_kernels", lambda *_: False)
    wanted = generate(model, num=3, length=9, seed=1)
    assert relative_error(given.x, wanted.x) < 1e-4


@pytest.mark.gpu
@torch.no_grad()
def test_gru_cell_is_that_of_pytorch():
    block = GRUBlock(small_model("rnn", width=64).config).to("cuda")
    x, h = normal(3, 1, 64), normal(3, 64, seed=1)
    given, _ = block(x, None)
    with torch.enable_grad():
        wanted, _ = block(x, None)
    assert relative_error(given, wanted) < SINGLE
    weights = [
        getattr(block.gru, f"{name}_l0")
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    ]
    cell = torch.gru_cell(block.norm(x[:, 0]), h, *weights)
    assert relative_error(block.cell(x, h), cell) < SINGLE
