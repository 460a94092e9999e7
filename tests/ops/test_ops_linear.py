"""The products for generation against PyTorch's, interpreted without a GPU and compiled with one."""

import types
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conftest import relative_error, small_model
from tests.interpreter import DEVICE, kernels, needs_interpreter, run_interpreted
from vssm import generate
from vssm.nn import GRUBlock
from vssm.ops import dispatch
from vssm.ops import linear as module
from vssm.ops.linear import Linear, Ready, linear, linear_ready, ready_parts
from vssm.ops.linear import weights as linear_weights
from vssm.ops.linear.weights import SplitWeights, halves_of
from vssm.ops.norm import RMSNorm
from vssm.ops.streams import FILL, Beside

SINGLE = 2e-6  # relative, in norm, against float64


@needs_interpreter
def test_in_the_interpreter():
    run_interpreted(__file__)


def normal(*shape, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(DEVICE, torch.float32)


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
    (70, 130, 4),
    (66, 20, 31),
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
    assert relative_error(linear(x, weight, backend="triton"), exact(x, weight)) < SINGLE
    given = linear(x, weight, bias, add, rms_norm(K), backend="triton")
    assert given.dtype == torch.float32
    assert relative_error(given, exact(x, weight, bias, add, rms_norm(K))) < SINGLE


@kernels
@torch.no_grad()
def test_a_program_goes_over_all_of_its_rows(monkeypatch):
    from vssm.ops.linear import triton as linear_triton

    monkeypatch.setattr(linear_triton, "PROCESSORS", 1)
    x, weight, norm = normal(150, 96), normal(20, 96, seed=1), rms_norm(96)
    how = linear_triton.Plan(16, 16, 128, 1, 8, 2, "once")
    given = linear_triton.forward(x, weight, None, None, norm.weight, norm.eps, how)
    assert relative_error(given, exact(x, weight, norm=norm)) < SINGLE


@kernels
@torch.no_grad()
def test_few_columns_need_more_rows():
    whole, weight = normal(5, 14, 36), normal(128, 4, seed=1)
    given = linear(whole[..., :4], weight, backend="triton")
    assert relative_error(given, exact(whole[..., :4], weight)) < SINGLE
    with pytest.raises(
        ValueError, match=r"weight has 4 columns.*more than 64 rows of fewer than 32"
    ):
        linear(whole[:4, :, :4], weight, backend="triton")


@kernels
@pytest.mark.parametrize("rows", [1, 5, 66])
@torch.no_grad()
def test_rows_of_any_scale(rows):
    """A row that is small next to the others is as accurate as they are; zeros are exact."""
    x, weight = normal(rows, 128), normal(24, 128, seed=1)
    x *= torch.logspace(-12, 12, rows).to(DEVICE)[:, None]
    weight *= torch.logspace(-12, 12, 24).to(DEVICE)[:, None]
    weight[7] = 0
    given, wanted = linear(x, weight, backend="triton"), exact(x, weight)
    assert (given[:, 7] == 0).all()
    scale = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    assert ((given - wanted).abs() <= SINGLE * scale).all()


@kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@torch.no_grad()
def test_what_is_not_finite_stays_so():
    from vssm.ops.linear.triton import Plan, forward

    x, weight = normal(3, 64), normal(20, 64, seed=1)
    x[1, 5], x[2, 6] = float("inf"), float("nan")
    for how in (None, *(Plan(16, 16, 32, 1, 4, 2, split) for split in ("turned", "none"))):
        given = forward(x, weight, how=how)
        assert torch.isfinite(given[0]).all()
        assert not torch.isfinite(given[1:]).any()
        assert not torch.isfinite(forward(weight, x, how=how)[:, 1:]).any()


@kernels
@torch.no_grad()
def test_a_result_is_made_ready_for_the_next_product():
    x, weight, after = normal(3, 130, 512), normal(544, 512, seed=1), normal(512, 544, seed=2)
    add, norm = normal(3, 130, 544, seed=3), rms_norm(544)
    made = linear_ready(x, weight, add, norm, len(after), "triton")
    assert isinstance(made, Ready) and made.x.shape == add.shape
    assert torch.equal(made.x, linear(x, weight, None, add, backend="triton"))
    wanted = exact(made.x, after, norm=norm)
    given = ready_parts(made, after)
    given = given if isinstance(given, torch.Tensor) else given.partial.sum(0).view(wanted.shape)
    assert relative_error(given, wanted) < SINGLE
    more = normal(3, 130, 512, seed=4)
    assert (
        relative_error(linear(made, after, after[0, :512], more), wanted + after[0, :512] + more)
        < SINGLE
    )
    # Whole where the next product splits by itself, and as it is where it also norms by itself.
    made = linear_ready(x, weight, add, norm, 20, "triton")
    assert isinstance(made, Ready) and isinstance(made.normed, torch.Tensor)
    assert relative_error(linear(made, after[:20]), exact(made.x, after[:20], norm=norm)) < SINGLE
    few = linear_ready(x[:1, :40], weight, add[:1, :40], norm, 512, "triton")
    assert isinstance(few, torch.Tensor) and relative_error(few, made.x[:1, :40].double()) < SINGLE
    assert isinstance(linear_ready(x, weight, add, norm, 512, "reference"), torch.Tensor)
    with pytest.raises(ValueError, match="the norm must be an RMSNorm"):
        linear_ready(x, weight, add, nn.LayerNorm(544).to(DEVICE), 512, "triton")
    with pytest.raises(ValueError, match="all tensors must be float32"):
        linear_ready(x, weight, add, rms_norm(544).bfloat16(), 512, "triton")
    made = linear_ready(x, weight, add, norm, 512, "triton")
    with pytest.raises(AssertionError, match="halves are not for a product"):
        linear(made, after[:20])


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
        given = linear(x, weight, backend="triton")
        assert given.shape == (*x.shape[:-1], 20) and given.is_contiguous()
        assert relative_error(given, exact(x, weight)) < SINGLE
    add = normal(20, 2, 3).movedim(0, -1)
    given = linear(whole[..., :64], weight, add=add, backend="triton")
    assert relative_error(given, exact(whole[..., :64], weight, add=add)) < SINGLE
    assert linear(whole[:0, :, :64], weight, backend="triton").shape == (0, 3, 20)
    bias = normal(20, 2, seed=2)[:, 1]
    for x in (whole[0, :1, :64], whole[..., :64]):
        given = linear(x, weight, bias, backend="triton")
        assert relative_error(given, exact(x, weight, bias)) < SINGLE


@kernels
@pytest.mark.parametrize("options", [{}, {"eps": 1e-5, "elementwise_affine": False}], ids=str)
@torch.no_grad()
def test_a_norm_that_no_kernel_does_is_done_before(options):
    x, weight, norm = normal(3, 64), normal(20, 64, seed=1), nn.RMSNorm(64, **options).to(DEVICE)
    assert (
        relative_error(linear(x, weight, norm=norm, backend="triton"), exact(norm(x), weight))
        < SINGLE
    )


@kernels
@pytest.mark.parametrize("split", ["tile", "turned", "tf32", "before", "once", "none"])
@torch.no_grad()
def test_every_way_to_split(split):
    """Each with and without parts of K, a norm, and rows, columns and K that no tile divides."""
    from vssm.ops.linear.triton import Plan, forward

    whole, weight, bias, add = (
        normal(37, 224),
        normal(21, 192, seed=1),
        normal(21, seed=2),
        normal(37, 21, seed=3),
    )
    x, norm = whole[:, 32:], rms_norm(192)
    x *= torch.logspace(-3, 3, 37).to(DEVICE)[:, None]
    for parts in (1,) if split in ("once", "none") else (1, 3):
        how = Plan(16, 16, 32, parts, 4, 2, split)
        given = forward(x, weight, bias, add, norm.weight, norm.eps, how)
        assert relative_error(given, exact(x, weight, bias, add, norm)) < SINGLE
        given = forward(x, weight, how=how)
        scale = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
        assert ((given - exact(x, weight)).abs() <= SINGLE * scale).all()


class Noted:
    """Halves as they are kept, without kernels."""

    def __init__(self, weights, split):
        self.kept = [
            types.SimpleNamespace(weight=weight, halves=split(weight)) for weight in weights
        ]
        self.renewed = 0

    def __call__(self, always=False):
        self.renewed += 1


def test_a_recording_reads_kept_halves_of_parameters():
    log = []
    weights = {name: nn.Parameter(torch.ones(2)) for name in "abc"}

    def split(weight):
        log.append(next((name for name, known in weights.items() if known is weight), "another"))
        return weight.detach() + 1, weight, weight

    def function():
        made = [halves_of(weights[name], split)[0] for name in "aba"]
        return torch.stack([*made, halves_of(2 * weights["c"], split)[0]])

    own = SplitWeights()
    with own.note() as noted:
        function()
    assert noted == [weights["a"], weights["b"]] and log == ["a", "b", "a", "another"]
    assert own.keep([]) == []
    renewal = Noted(noted, split)
    weights["a"].data.fill_(3)
    log.clear()
    with own.renewed([renewal]):
        assert function()[:, 0].tolist() == [2, 2, 2, 3]
    assert log == ["another"] and renewal.renewed == 1
    for end in (own.renewed([]), own.note()):
        with pytest.raises(KeyError), end:
            raise KeyError
        log.clear()
        assert function()[:, 0].tolist() == [4, 2, 4, 3]
        assert log == ["a", "b", "a", "another"], "a plain call splits by itself"


def test_a_capture_waits_for_a_weight_where_it_first_reads_it(monkeypatch):
    """And for what was not read, at its end, also when that comes early."""
    log = []

    class Logged:
        def __init__(self, device, what, priority):
            self.what, self.stream = what, nullcontext()
            log.append(f"fork {what}")

        def join(self):
            log.append(f"join {self.what}")

    monkeypatch.setattr(linear_weights, "Beside", Logged)
    a, b, c, d = (nn.Parameter(torch.ones(2)) for _ in range(4))
    halves = lambda weight: (weight, weight, weight)  # noqa: E731
    renewals = [Noted([a], halves), Noted([b, c], halves), Noted([d], halves)]
    with SplitWeights().renewed(renewals):
        halves_of(nn.Parameter(torch.ones(2)), halves)
        log.append("start")
        for name, weight in (("a", a), ("b", b), ("c", c), ("b", b)):
            halves_of(weight, halves)
            log.append(f"product {name}")
    fork, join = "fork weights", "join weights"
    products = [
        fork,
        join,
        fork,
        "product a",
        join,
        "product b",
        join,
        fork,
        "product c",
        join,
        "product b",
    ]
    assert log == ["start", *products, join, join, join]
    assert [renewal.renewed for renewal in renewals] == [1, 1, 1]
    log.clear()
    with pytest.raises(KeyError), SplitWeights().renewed(renewals):
        halves_of(d, halves)  # another order than before
        raise KeyError
    assert log == [fork, join, join]
    assert [renewal.renewed for renewal in renewals] == [1, 1, 2]


@pytest.mark.gpu
def test_what_is_recorded_beside_is_waited_for_once_by_each_stream():
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(1 << 22, device="cuda")
    first, second = x.clone(), x.clone()

    def work():
        slow = Beside(x.device, "slow", FILL)
        with slow.stream:
            for _ in range(20):
                x.add_(1)
        reading = Beside(x.device, "reading")
        with reading.stream:
            for _ in range(2):
                slow.join()
            first.copy_(x)
        slow.join()
        second.copy_(x)
        reading.join()

    work()
    assert (first == 20).all() and (second == 20).all()
    with torch.cuda.graph(graph):
        work()
    for turn in (2, 3):
        graph.replay()
        assert (first == 20 * turn).all() and (second == 20 * turn).all()


def test_weights_out_of_line_are_not_kept():
    """Their bits could not be read many at a time."""
    flat = torch.ones(2 * 64 + 1)
    weights = [nn.Parameter(flat[1:].view(2, 64)), nn.Parameter(torch.ones(64, 2).T)]
    with SplitWeights().note() as noted:
        for weight in weights:
            halves_of(weight, lambda w: (w, w, w))
    assert not noted


@kernels
@torch.no_grad()
def test_products_with_kept_halves_are_the_same():
    from vssm.ops.linear.triton import Plan, forward

    how = Plan(16, 16, 32, 1, 4, 2, "before")
    x, weight, own = normal(5, 64), nn.Parameter(normal(20, 64)), SplitWeights()
    wanted = forward(x, weight, how=how)
    with own.note() as noted:
        assert torch.equal(forward(x, weight, how=how), wanted)
    renewals = own.keep(noted)
    with own.renewed(renewals):
        assert torch.equal(forward(x, weight, how=how), wanted)
    assert relative_error(wanted, exact(x, weight)) < SINGLE
    weight.data[7, 5] = 1e3
    changed = forward(x, weight, how=how)
    with own.renewed(renewals):
        assert torch.equal(forward(x, weight, how=how), changed)
    assert not torch.equal(wanted, changed)


def negate_upper(weight):
    """Changes what is the sign of the upper half of a 64-bit word, of two words."""
    weight[0, [1, 3]] *= -1


@kernels
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w[20, 543].mul_(1 + 2**-23),
        lambda w: w[3, 5].fill_(0),
        lambda w: w[3, 5].neg_(),
        negate_upper,
        lambda w: w[8:16].neg_(),
        lambda w: w[:8].mul_(2),
        lambda w: w[:2].copy_(w[:2].flip(0)),
        lambda w: w[0].copy_(w[0].roll(2)),
        lambda w: w[:2, :2].copy_(w[:2, :2].flip(0)),
    ],
    ids=[
        "last bit",
        "zero",
        "sign",
        "upper signs",
        "negated",
        "doubled",
        "rows",
        "rolled",
        "words",
    ],
)
@torch.no_grad()
def test_rows_are_split_again_when_a_bit_has_changed(change):
    """And only those that share a mark."""
    from vssm.ops.linear.triton import _split
    from vssm.ops.linear.weights_triton import rows_of

    weights = [nn.Parameter(normal(*shape)) for shape in ((21, 544), (21, 544), (5, 1024))]
    own = SplitWeights()
    renewals, rows = own.keep(weights), rows_of(544)
    all_kept = [kept for renewal in renewals for kept in renewal.kept]
    before = weights[1].clone()
    change(weights[1].data)
    changed = (before != weights[1]).any(1)
    for kept in all_kept:
        for half in kept.halves:
            half.fill_(7)
    for renewal in renewals:
        renewal()
    split = torch.zeros(24, dtype=torch.bool, device=DEVICE)
    for row in changed.nonzero().ravel().tolist():
        split[row // rows * rows : row // rows * rows + rows] = True
    for i, kept in enumerate(all_kept):
        again = (
            split[:21] if i == 1 else torch.zeros(len(kept.weight), dtype=torch.bool, device=DEVICE)
        )
        for half, wanted in zip(kept.halves, _split(kept.weight), strict=True):
            assert torch.equal(half[again], wanted[again]) and (half[~again] == 7).all()
    assert changed.any()


@kernels
@torch.no_grad()
def test_halves_are_shared_and_go_with_those_who_read_them():
    a, b = nn.Parameter(normal(6, 512)), nn.Parameter(normal(6, 512))
    own = SplitWeights()
    (first,), (other, second) = own.keep([a]), own.keep([b, a])
    assert second.kept == first.kept and other.kept[0].weight is b and len(own._kept) == 2
    # What one has split again is right for the other, also when the weight is then as it was.
    old = first.kept[0].halves[0].clone()
    a.data.neg_()
    first()
    a.data.neg_()
    second()
    assert torch.equal(second.kept[0].halves[0], old)
    del other, second
    assert list(own._kept) == [id(a)]
    a.data = a.data.clone()
    assert own.keep([a])[0].kept[0] is not first.kept[0], "it has moved"
    del first
    assert not own._kept


@kernels
def test_plans_cover_the_depth():
    from vssm.ops.linear.triton import plan, plan_row

    for N, K in ((4096, 1024), (96, 2048), (2048, 64), (28, 1024), (40, 96), (7, 160), (600, 544)):
        assert K % plan_row(N, K).BK == 0
        for M in (2, 16, 28, 64, 65, 448, 1024, 28672, 200_000):
            for shared in (227 * 1024, 99 * 1024):
                how = plan(M, N, K, shared)
                assert K % (how.SPLIT * how.BK) == 0 and how.BK >= 32
                assert how.SPLIT == 1 or K // how.SPLIT >= 64
                assert how.stages >= (1 if how.split == "none" else 2)
                if (
                    how.split == "once"
                ):  # tiles on their way and at work, the weight, and what a launch takes
                    ahead, made = 4 * how.BM * how.BK, 4 * how.BM * how.BN
                    room = (
                        (how.stages - 1) * (ahead + made) + max(ahead, made) + 4 * how.BN * how.BK
                    )
                    assert room + 1024 <= shared
                else:
                    assert 4 * how.stages * how.BK * (how.BM + how.BN) <= shared


@kernels
@torch.no_grad()
def test_an_older_triton_is_refused(monkeypatch):
    monkeypatch.setattr(module, "_has_descriptors", lambda: False)
    with pytest.raises(ValueError, match=r"it needs Triton 3\.4 or more"):
        linear(normal(3, 64), normal(2, 64), backend="triton")


def test_no_triton_is_no_error(monkeypatch):
    absent = ModuleNotFoundError("No module named 'triton'")
    monkeypatch.setattr("importlib.util.find_spec", Mock(side_effect=absent))
    assert not module._has_descriptors.__wrapped__()


def test_auto_is_pytorch_where_it_must_be():
    layer, x, add = Linear(64, 8), torch.rand(5, 64), torch.rand(5, 8)
    norm = RMSNorm(64, eps=1e-5)
    wanted = F.linear(norm(x), layer.weight, layer.bias) + add
    assert torch.equal(layer(x, add, norm), wanted)
    with torch.no_grad():
        assert torch.equal(layer(x, add, norm), wanted)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, add, norm), wanted)
    wanted.sum().backward()
    assert layer.weight.grad is not None
    assert isinstance(layer, nn.Linear)
    other = nn.LayerNorm(64)
    assert torch.equal(layer(x, norm=other), F.linear(other(x), layer.weight, layer.bias))


@kernels
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": torch.rand(8, 60), "x": torch.rand(5, 60)}, "weight has 60 columns"),
        ({"weight": torch.rand(8, 32)}, "weight has 32 columns"),
        ({"weight": torch.rand(8, 64).half()}, "float32 on one device"),
        ({"add": torch.rand(8)}, r"add has shape \(8,\)"),
        ({"weight": torch.rand(8, 64).requires_grad_()}, "no gradient"),
        ({"backend": "numba"}, "backend='numba' is unknown"),
    ],
)
def test_bad_input(changed, message):
    given: dict[str, Any] = {
        "x": torch.rand(5, 64),
        "weight": torch.rand(8, 64),
        "backend": "triton",
    }
    for name, value in {**given, **changed}.items():
        given[name] = value.to(DEVICE) if isinstance(value, torch.Tensor) else value
    with pytest.raises(ValueError, match=message) as caught:
        linear(**given)
    assert "\n" not in str(caught.value)


@kernels
def test_autocast_is_refused():
    x, weight = normal(5, 64), normal(8, 64)
    with torch.autocast(DEVICE, torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        linear(x, weight, backend="triton")


MODEL = [
    *((28, N, K) for N, K in ((4096, 1024), (96, 2048), (2048, 64), (1024, 2048), (28, 1024))),
    *((56, N, K) for N, K in ((4096, 1024), (96, 2048), (1024, 2048))),
    *((1, 4096, 1024), (16, 3072, 1024), (448, 1024, 2048), (1024, 4096, 1024), (3584, 96, 2048)),
    *((100_000, 256, 64), (100_000, 36, 128), (100_000, 128, 4), (1800, 64, 24)),
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
    first, second = (linear(x, weight, bias, add, rms_norm(K), backend="auto") for _ in range(2))
    assert torch.equal(first, second)
    wanted = exact(x, weight, bias, add, rms_norm(K))
    assert relative_error(first, wanted) < SINGLE
    positive = exact(
        x.abs(), weight.abs()
    )  # sums that grow, where every cut-off bit has the same sign
    twin = relative_error(F.linear(x.abs(), weight.abs()), positive)
    assert relative_error(linear(x.abs(), weight.abs(), backend="triton"), positive) < max(
        SINGLE, 2 * twin
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["vssm", "ssm", "rnn", "vrnn", "transformer", "tvae"])
def test_generation_is_the_same_without(kind, monkeypatch):
    model = small_model(kind, width=64).to("cuda")
    asked = []

    def count(*arguments):
        asked.append(dispatch.choose_fused(*arguments))
        return asked[-1]

    monkeypatch.setattr(module, "choose_fused", count)
    given = generate(model, num=3, length=9, seed=1, graphs=False)
    assert any(asked)
    monkeypatch.setattr(module, "choose_fused", lambda *_: False)
    wanted = generate(model, num=3, length=9, seed=1, graphs=False)
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
    assert relative_error(block._cell(x, h), cell) < SINGLE
