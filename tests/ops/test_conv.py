"""The fused convolution: its kernels against its twin, and its twin against PyTorch's own."""

from functools import partial

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from tests.conftest import relative_error
from tests.interpreter import DEVICE, kernels, needs_interpreter, run_interpreted
from vssm.ops.conv import MAX_TAPS, causal_conv_silu
from vssm.ops.conv.reference import causal_conv_silu_reference

SIZES = [(2, 1, 3, 4), (1, 2, 5, 4), (2, 35, 5, 4), (1, 5, 520, 3), (2, 4, 4, 1)]


@needs_interpreter
def test_in_the_interpreter():
    run_interpreted(__file__)


def arguments(batch, length, channels, taps, state=True, dtype=torch.float32, device=DEVICE):
    """The input as one half of a tensor, as a Mamba block makes it."""
    x = torch.randn(batch, length, 2 * channels, device=device).to(dtype)[..., :channels]
    weight, bias = torch.randn(channels, taps, device=device), torch.randn(channels, device=device)
    before = torch.randn(batch, taps - 1, channels, device=device).to(dtype) if state else None
    return x, weight, bias, before


def results(function, values, dy, dafter):
    """Returns the outputs and all gradients of a function."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in values]
    y, after = function(*leaves)
    total = (y * dy).sum() + (after * dafter).sum()
    return [y, after, *torch.autograd.grad(total, [leaf for leaf in leaves if leaf is not None])]


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_twin_is_pytorchs_convolution(size, state):
    x, weight, bias, before = arguments(*size, state)
    padded = torch.cat([before, x], 1) if state else F.pad(x, (0, 0, size[3] - 1, 0))
    wanted = F.silu(F.conv1d(padded.mT, weight[:, None], bias, groups=size[2]).mT)
    y, after = causal_conv_silu_reference(x, weight, bias, before)
    assert torch.allclose(y, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(after, padded[:, size[1] :])


@kernels
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_kernels_follow_the_twin(size, state):
    pytest.importorskip("triton")
    values = arguments(*size, state)
    dy, dafter = (
        torch.randn(size[:3], device=DEVICE),
        torch.randn(size[0], size[3] - 1, size[2], device=DEVICE),
    )
    wanted = results(causal_conv_silu_reference, values, dy, dafter)
    for given, right in zip(
        results(partial(causal_conv_silu, backend="triton"), values, dy, dafter),
        wanted,
        strict=True,
    ):
        assert given.shape == right.shape
        assert given.numel() == 0 or relative_error(given, right) < 1e-5
    with torch.no_grad():
        y, after = causal_conv_silu(*values, backend="triton")
    assert relative_error(y, wanted[0]) < 1e-5
    assert torch.equal(after, wanted[1])


sizes = st.tuples(*map(st.integers, (1, 1, 1, 1), (20, 70, 40, MAX_TAPS)))


@hypothesis.given(size=sizes, state=st.booleans(), contiguous=st.booleans())
@hypothesis.settings(max_examples=60, deadline=None)
def test_numba_follows_the_twin_in_float64(size, state, contiguous):
    values = arguments(*size, state, device="cpu")
    if contiguous:
        values = (
            values[0].mT.contiguous().mT,
            *values[1:],
        )  # steps are next to each other, channels are not
    dy, dafter = torch.randn(size[:3]), torch.randn(size[0], size[3] - 1, size[2])
    exact = [None if t is None else t.double() for t in values]
    wanted = results(causal_conv_silu_reference, exact, dy.double(), dafter.double())
    numba = partial(causal_conv_silu, backend="numba")
    given, again = (results(numba, values, dy, dafter) for _ in range(2))
    for some, right, same in zip(given, wanted, again, strict=True):
        assert some.shape == right.shape and torch.equal(some, same)
        assert some.numel() == 0 or relative_error(some.double(), right) < 1e-5
    with torch.no_grad():
        y, after = numba(*values)
    assert torch.equal(y, given[0]) and torch.equal(after, given[1])


@torch.no_grad()
def test_numba_does_not_depend_on_cuts_or_threads():
    x, weight, bias, before = arguments(9, 70, 37, 4, device="cpu")
    y, after = causal_conv_silu(x, weight, bias, before, "numba")
    for cut in (1, 2, 33, 69):
        first, middle = causal_conv_silu(x[:, :cut], weight, bias, before, "numba")
        second, end = causal_conv_silu(x[:, cut:], weight, bias, middle, "numba")
        assert torch.equal(torch.cat([first, second], 1), y) and torch.equal(end, after)
        assert torch.equal(causal_conv_silu(x[:5], weight, bias, before[:5], "numba")[0], y[:5])
    threads = torch.get_num_threads()
    try:
        for other in (1, 3):
            torch.set_num_threads(other)
            assert torch.equal(causal_conv_silu(x, weight, bias, before, "numba")[0], y)
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def test_a_state_does_not_hold_on_to_the_whole_input():
    x, weight, bias, _ = arguments(1, 50, 8, 4, device="cpu")
    _, after = causal_conv_silu(x, weight, bias)
    assert after.untyped_storage().nbytes() == after.nbytes


def test_too_many_taps_for_the_kernel():
    x, weight, bias, before = arguments(1, 5, 3, MAX_TAPS + 1, device="cpu")
    y, after = causal_conv_silu(x, weight, bias, before)
    wanted, end = causal_conv_silu_reference(x, weight, bias, before)
    assert torch.equal(y, wanted) and torch.equal(after, end)
    with pytest.raises(ValueError, match="up to 16 taps, not 17; choose 'auto' or 'reference'"):
        causal_conv_silu(x, weight, bias, before, "numba")


@pytest.mark.parametrize("backend", ["numba", pytest.param("triton", marks=kernels)])
def test_operator_is_registered_properly(backend):
    pytest.importorskip(backend)
    device = DEVICE if backend == "triton" else "cpu"
    values = [t.requires_grad_() for t in arguments(2, 5, 3, 4, device=device)]
    torch.library.opcheck(torch.ops.vssm.conv_silu.default, (*values, None, backend))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_sizes(dtype):
    values = arguments(256, 28, 2048, 4, dtype=dtype)
    dy, dafter = torch.randn(256, 28, 2048, device="cuda"), torch.randn(256, 3, 2048, device="cuda")
    exact = [t.double() for t in values]
    wanted = results(causal_conv_silu_reference, exact, dy.double(), dafter.double())
    given, again = (results(causal_conv_silu, values, dy, dafter) for _ in range(2))
    for some, right, same in zip(given, wanted, again, strict=True):
        assert relative_error(some.double(), right) < (1e-5 if dtype == torch.float32 else 1e-2)
        assert torch.equal(some, same)


def test_bad_input():
    x, weight, bias, _ = arguments(1, 2, 3, 4)
    with pytest.raises(ValueError, match="backend='cuda' is unknown; choose from 'auto'"):
        causal_conv_silu(x, weight, bias, backend="cuda")


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 5, 4), (3, 3), (4,)],
        [(2, 5, 4), (4, 3), (2,)],
        [(2, 5, 4), (4, 0), (4,)],
        [(5, 4), (4, 3), (4,)],
        [(2, 5, 4), (4, 3), (4,), (2, 1, 4)],
        [(2, 5, 4), (4, 3), (4,), (2, 2, 3)],
        [(2, 5, 4), (4, 3), (4,), (3, 2, 4)],
        [(2, 5, 4), (4, 3), (4,), (0, 2, 4)],
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, backend):
    with pytest.raises(ValueError, match=r"do not fit; they must be x \(B, T, D\), weight"):
        causal_conv_silu(*(torch.rand(shape) for shape in shapes), backend=backend)
    with pytest.raises(ValueError, match=r"^bias is NoneType; it must be a tensor"):
        causal_conv_silu(torch.rand(2, 5, 4), torch.rand(4, 3), None)
