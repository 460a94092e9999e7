"""`selective_scan_fn` against mamba-ssm's documented formula, number by number."""

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import relative_error
from vssm.ops import selective_scan_fn

BATCH, CHANNELS, LENGTH, STATES = 2, 6, 5, 3
SHAPES = {
    "constant": (CHANNELS, STATES),
    "shared": (BATCH, STATES, LENGTH),
    "one group": (BATCH, 1, STATES, LENGTH),
    "three groups": (BATCH, 3, STATES, LENGTH),
    "own": (BATCH, CHANNELS, STATES, LENGTH),
}
KINDS = [
    ("shared", "shared"),
    ("one group", "shared"),
    ("three groups", "three groups"),
    ("three groups", "shared"),
    ("shared", "own"),
    ("constant", "constant"),
    ("constant", "three groups"),
    ("shared", "constant"),
]


def at(matrix, b, d, n, t):
    """The number of B or C that channel d of sequence b reads for state n at step t."""
    if matrix.dim() == 2:
        return matrix[d, n]
    if matrix.dim() == 3:
        return matrix[b, n, t]
    return matrix[b, d * matrix.shape[1] // CHANNELS, n, t]


def by_formula(u, delta, A, B, C, D, z, delta_bias, softplus, h0):
    if delta_bias is not None:
        delta = delta + delta_bias[:, None]
    if softplus:
        delta = F.softplus(delta)
    ys, hs = [], []
    for b in range(BATCH):
        for d in range(CHANNELS):
            h = [
                torch.zeros((), dtype=u.dtype) if h0 is None else h0[b, d, n] for n in range(STATES)
            ]
            for t in range(LENGTH):
                step, x = delta[b, d, t], u[b, d, t]
                y = 0 if D is None else D[d] * x
                for n in range(STATES):
                    h[n] = torch.exp(step * A[d, n]) * h[n] + step * at(B, b, d, n, t) * x
                    y = y + at(C, b, d, n, t) * h[n]
                ys.append(y if z is None else y * F.silu(z[b, d, t]))
            hs += h
    return torch.stack(ys).view(u.shape), torch.stack(hs).view(BATCH, CHANNELS, STATES)


def arguments(kind_B, kind_C, everything=True):
    """Returns u, delta, A, B, C, D, z, delta_bias and initial_state in float64."""
    vector, channel = (BATCH, CHANNELS, LENGTH), (CHANNELS,)
    shapes = [vector, vector, (CHANNELS, STATES), SHAPES[kind_B], SHAPES[kind_C]]
    shapes += [channel, vector, channel, (BATCH, CHANNELS, STATES)]
    made = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    made[1], made[2] = made[1].abs(), -made[2].exp()
    return made if everything else [*made[:5], None, None, None, None]


def run(inputs, softplus):
    *first, h0 = inputs
    return selective_scan_fn(*first, softplus, True, initial_state=h0)


def run_formula(inputs, softplus):
    *first, h0 = inputs
    return by_formula(*first, softplus, h0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize(("kind_B", "kind_C"), KINDS)
def test_values_and_gradients_follow_the_formula(kind_B, kind_C, everything, dtype):
    exact = arguments(kind_B, kind_C, everything)
    given = [None if t is None else t.to(dtype).requires_grad_() for t in exact]
    exact = [None if t is None else t.requires_grad_() for t in exact]
    expected, found = run_formula(exact, everything), run(given, everything)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    weights = [torch.randn_like(part) for part in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert relative_error(ours, theirs) < tolerance
    gradients = [
        torch.autograd.grad(
            sum(
                (part * weight.to(part)).sum() for part, weight in zip(parts, weights, strict=True)
            ),
            [tensor for tensor in inputs if tensor is not None],
        )
        for parts, inputs in ((found, given), (expected, exact))
    ]
    for ours, theirs in zip(*gradients, strict=True):
        assert relative_error(ours, theirs) < tolerance


@pytest.mark.parametrize("kind", ["shared", "constant"])
def test_bfloat16_keeps_its_dtype_and_states_are_float32(kind):
    inputs = arguments(kind, kind)
    half = [t.to(torch.bfloat16) for t in inputs]
    y, h = run(half, True)
    expected, _ = run_formula([t.double() for t in half], True)
    assert (y.dtype, h.dtype) == (torch.bfloat16, torch.float32)
    assert relative_error(y, expected) < 1e-2


@pytest.mark.parametrize("kind", ["shared", "three groups", "constant"])
def test_cut_sequence_continues_from_its_state(kind):
    u, delta, A, B, C, D, z, bias, _ = arguments(kind, kind)

    def part(steps, h0):
        varying = [t[..., steps] for t in (u, delta)]
        matrices = [t if t.dim() == 2 else t[..., steps] for t in (B, C)]
        return selective_scan_fn(
            *varying, A, *matrices, D, z[..., steps], bias, True, True, initial_state=h0
        )

    whole, last = part(slice(None), None)
    first, h = part(slice(0, 2), None)
    rest, h = part(slice(2, None), h)
    assert relative_error(torch.cat([first, rest], -1), whole) < 1e-12
    assert relative_error(h, last) < 1e-12


def test_last_state_is_returned_only_on_request():
    inputs = arguments("shared", "shared")[:5]
    y = selective_scan_fn(*inputs)
    assert torch.equal(selective_scan_fn(*inputs, return_last_state=True)[0], y)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "A",
            lambda t: t.to(torch.complex64),
            r"A is complex; the scan takes real A, B and C only",
        ),
        ("A", lambda t: t[1:], r"u has shape \(2, 6, 5\) and A \(5, 3\); expected"),
        ("u", lambda t: t[0], r"u has shape \(6, 5\) and A \(6, 3\); expected"),
        ("delta", lambda t: t.mT, r"delta has shape \(2, 5, 6\); expected \(2, 6, 5\)"),
        ("D", lambda t: t[1:], r"D has shape \(5,\); expected \(6,\)"),
        ("z", lambda t: t[..., 1:], r"z has shape \(2, 6, 4\); expected \(2, 6, 5\)"),
        ("initial_state", lambda t: t[:1], r"initial_state has shape \(1, 6, 3\); expected"),
        ("B", lambda t: t.mT, r"B has shape \(2, 5, 3\); expected \(6, 3\), \(2, 3, 5\) or"),
        ("C", lambda t: t[:, None].expand(-1, 4, -1, -1), r"C has shape .* that divide 6"),
    ],
)
def test_wrong_arguments_are_named(name, change, message):
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")
    given = dict(zip(names, arguments("shared", "shared"), strict=True))
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=message) as error:
        selective_scan_fn(**given)
    assert "\n" not in str(error.value)


def test_different_groups_are_refused():
    given = arguments("three groups", "own")[:5]
    with pytest.raises(ValueError, match="B has 3 groups and C 6; expected the same number"):
        selective_scan_fn(*given)
