"""Packed sequences: `cu_seqlens` gives every sequence what it gives alone, gradients included."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import relative_error
from tests.interpreter import DEVICE, kernels, needs_interpreter, run_interpreted
from tests.ops.test_scan import OPTIONAL, arguments
from vssm.ops import causal_conv_silu, selective_scan

CLOSE = 1e-5  # relative, in norm; sums over sequences come in another order


@needs_interpreter
def test_in_the_interpreter():
    run_interpreted(f"{__file__}")


def leaves_of(values, device):
    return {
        name: v.detach().to(device).requires_grad_() if torch.is_tensor(v) else v
        for name, v in values.items()
    }


def gradients(results, leaves):
    total = sum((result.float().square() * (i + 1)).sum() for i, result in enumerate(results))
    tensors = [v for v in leaves.values() if torch.is_tensor(v)]
    return torch.autograd.grad(total, tensors)


def assert_packed_equals_alone(function, values, per_step, state, lengths, backend):
    """Compares one packed call with one call for each sequence."""
    device = "cpu" if backend == "numba" else DEVICE
    starts = [0, *accumulate(lengths)]
    packed = leaves_of(values, device)
    made = function(**packed, backend=backend, cu_seqlens=torch.tensor(starts, device=device))
    alone = leaves_of(values, device)
    parts = []
    for i, (first, length) in enumerate(zip(starts, lengths, strict=False)):
        own = {
            name: v[:, first : first + length] if name in per_step and v is not None else v
            for name, v in alone.items()
        }
        own[state] = None if own[state] is None else own[state][i : i + 1]
        parts.append(function(**own, backend=backend))
    ys, states = zip(*parts, strict=True)
    wanted = torch.cat(ys, 1), torch.cat(states)
    pairs = [
        *zip(made, wanted, strict=True),
        *zip(gradients(made, packed), gradients(wanted, alone), strict=True),
    ]
    for given_, right in pairs:
        assert given_.shape == right.shape
        assert relative_error(given_, right) < CLOSE


def scan_values(lengths, channels, states, optional, softplus=True):
    values = arguments(1, sum(lengths), channels, states, optional, softplus)
    if values["h0"] is not None:
        values["h0"] = torch.randn(len(lengths), channels, states)
    return values


def conv_values(lengths, channels, taps, state):
    return {
        "x": torch.randn(1, sum(lengths), channels),
        "weight": torch.randn(channels, taps),
        "bias": torch.randn(channels),
        "state": torch.randn(len(lengths), taps - 1, channels) if state else None,
    }


lengths = st.lists(st.integers(1, 70), min_size=1, max_size=5)
PER_STEP = ("u", "dt", "B", "C", "z")


@pytest.mark.parametrize("backend", ["reference", "numba"])
@given(
    lengths=lengths,
    channels=st.integers(1, 40),
    states=st.integers(1, 6),
    optional=st.sets(st.sampled_from(OPTIONAL)),
    softplus=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_packed_scans_equal_scans_of_each_sequence(
    backend, lengths, channels, states, optional, softplus
):
    values = scan_values(lengths, channels, states, tuple(optional), softplus)
    assert_packed_equals_alone(selective_scan, values, PER_STEP, "h0", lengths, backend)


@pytest.mark.parametrize("backend", ["reference", "numba"])
@given(lengths=lengths, channels=st.integers(1, 40), taps=st.integers(1, 5), state=st.booleans())
@settings(max_examples=15, deadline=None)
def test_packed_convolutions_equal_those_of_each_sequence(backend, lengths, channels, taps, state):
    values = conv_values(lengths, channels, taps, state)
    assert_packed_equals_alone(causal_conv_silu, values, ("x",), "state", lengths, backend)


@kernels
@pytest.mark.parametrize(
    ("lengths", "channels", "states", "given", "softplus"),
    [
        ([3, 1, 2], 5, 3, OPTIONAL, True),
        ([33, 1, 36], 3, 16, OPTIONAL, True),
        ([65, 2], 2, 5, ("z",), False),
    ],
)
def test_the_kernels_of_a_gpu_take_packed_scans(lengths, channels, states, given, softplus):
    values = scan_values(lengths, channels, states, given, softplus)
    assert_packed_equals_alone(selective_scan, values, PER_STEP, "h0", lengths, "triton")


@kernels
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("lengths", [[3, 1, 2], [40, 1, 33, 70], [5]])
@pytest.mark.parametrize("taps", [1, 4])
def test_the_kernels_of_a_gpu_take_packed_convolutions(lengths, taps, state):
    values = conv_values(lengths, 5, taps, state)
    assert_packed_equals_alone(causal_conv_silu, values, ("x",), "state", lengths, "triton")


def test_operators_of_packed_sequences_are_registered_properly():
    starts, values = torch.tensor([0, 2, 5]), scan_values([2, 3], 3, 2, OPTIONAL)
    tensors = [v.requires_grad_() for v in values.values() if torch.is_tensor(v)]
    check = torch.library.opcheck
    check(torch.ops.vssm.selective_scan.default, (*tensors, starts, True, "numba", True))
    tensors = [v.requires_grad_() for v in conv_values([2, 3], 3, 4, True).values()]
    check(torch.ops.vssm.conv_silu.default, (*tensors, starts, "numba"))


def test_one_packed_sequence_is_the_plain_call():
    values = arguments(1, 40, 17, 5)
    plain = selective_scan(**values)
    packed = selective_scan(**values, cu_seqlens=torch.tensor([0, 40], dtype=torch.int32))
    assert all(torch.equal(a, b) for a, b in zip(packed, plain, strict=True))


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (
            torch.tensor([0, 4, 4, 7]),
            "cu_seqlens does not rise: 4 is followed by 4; every number must be ",
        ),
        (
            torch.tensor([0, 5, 3, 7]),
            "cu_seqlens does not rise: 5 is followed by 3; every number must be ",
        ),
        (
            torch.tensor([1, 4, 7]),
            "cu_seqlens starts with 1 and ends with 7; it must go from 0 to 7",
        ),
        (
            torch.tensor([0, 4, 8]),
            "cu_seqlens starts with 0 and ends with 8; it must go from 0 to 7",
        ),
        (torch.tensor([[0, 7]]), "cu_seqlens must be a tensor of shape"),
        (torch.tensor([]), "cu_seqlens must be a tensor of shape"),
        (torch.tensor([0.0, 7.0]), "cu_seqlens has dtype torch.float32; it must hold integers"),
        ([0, 7], "cu_seqlens must be a tensor"),
    ],
)
def test_bad_starts_are_named(starts, message):
    values = {name: v for name, v in arguments(1, 7, 5, 3).items() if name != "h0"}
    x, weight, bias = values["u"], torch.rand(5, 4), torch.rand(5)
    for call in (
        lambda: selective_scan(**values, cu_seqlens=starts),
        lambda: causal_conv_silu(x, weight, bias, cu_seqlens=starts),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_packed_sequences_need_one_row_and_a_state_each():
    starts, values = torch.tensor([0, 3, 7]), arguments(2, 7, 5, 3)
    with pytest.raises(
        ValueError, match=r"the input is \(2, 7, 5\); with cu_seqlens it must be \(1, length"
    ):
        selective_scan(**values, cu_seqlens=starts)
    values = {**arguments(1, 7, 5, 3), "h0": torch.zeros(1, 5, 3)}
    with pytest.raises(ValueError, match=r"h0 has shape \(1, 5, 3\); u and A ask for \(2, 5, 3\)"):
        selective_scan(**values, cu_seqlens=starts)
