"""Heads and latents against closed forms, torch.distributions and brute force."""

import copy
import math
import pickle

import pytest
import torch
import torch.distributions as td
from hypothesis import given, settings
from hypothesis import strategies as st

from vssm.distributions import HEADS, HEADS_IN_UNIT, Latents, gumbel_uniform, make_head
from vssm.noise import uniform

EXACT = {"rtol": 1e-5, "atol": 1e-5}  # float32 against float64 or another float32 formula
FLOATS = [name for name in HEADS if name != "categorical"]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def noises(count, steps, components, seed=5):
    return uniform(torch.full((count,), seed), torch.arange(count), 0, steps, components)


def observations(head, batch=2, length=5, seed=1):
    u = torch.rand(batch, length, head.features, generator=torch.Generator().manual_seed(seed))
    return (u[..., 0] * head.features).long() if head.tokens else (u * 255).round() / 255


def grid(bins):
    return torch.arange(bins) / (bins - 1)


@pytest.mark.parametrize("name", HEADS)
def test_head_contract(name):
    head = make_head(name, features=7)
    w = normal(2, 5, head.size).requires_grad_()
    p_x, x = head(w), observations(head)
    head.validate(x)
    assert head.name == name and head.features == 7
    log_prob = p_x.log_prob(x)
    assert log_prob.shape == (2, 5) and log_prob.dtype == torch.float32
    log_prob.sum().backward()
    assert w.grad is not None and torch.isfinite(w.grad).all() and (w.grad != 0).any(-1).all()
    for value in (
        p_x.mean,
        p_x.sample(noises(2, 5, head.noise_size)),
        p_x.sample(noises(2, 5, head.noise_size), 0.5),
    ):
        assert value.shape == x.shape and value.dtype == x.dtype
        head.validate(value.detach())
    # A model holds its head: it must survive a copy and a pickle.
    for other in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert torch.equal(other(w).log_prob(x), log_prob)


@pytest.mark.parametrize("name", HEADS)
def test_head_computes_in_float32_or_float64(name):
    head = make_head(name, features=3)
    w, x = normal(2, 5, head.size), observations(head)
    low = head(w.bfloat16()).log_prob(x)
    assert low.dtype == torch.float32
    assert torch.equal(low, head(w.bfloat16().float()).log_prob(x))
    high = head(w.double()).log_prob(x)
    assert high.dtype == torch.float64
    torch.testing.assert_close(head(w).log_prob(x).double(), high, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_head_is_finite_for_extreme_outputs(name, size):
    head = make_head(name, features=3)
    w = (normal(4, 5, head.size) * size).requires_grad_()
    p_x, x = head(w), observations(head, batch=4)
    log_prob = p_x.log_prob(x)
    log_prob.sum().backward()
    assert w.grad is not None and torch.isfinite(log_prob).all() and torch.isfinite(w.grad).all()
    for value in (p_x.mean, p_x.sample(noises(4, 5, head.noise_size))):
        assert torch.isfinite(value).all()


def test_gaussian_matches_torch():
    w, x = normal(2, 5, 3), normal(2, 5, 3, seed=1)
    p_x, expected = make_head("gaussian", 3, sigma=0.1)(w), td.Normal(w.double(), 0.1)
    torch.testing.assert_close(
        p_x.log_prob(x).double(), expected.log_prob(x.double()).sum(-1), **EXACT
    )
    assert torch.equal(p_x.mean, w)
    u = noises(2, 5, 3)
    torch.testing.assert_close(p_x.sample(u).double(), expected.icdf(u.double()), **EXACT)


def test_gaussian_is_capped_at_the_known_value():
    p_x = make_head("gaussian", 784, sigma=0.1)(torch.zeros(1, 1, 784))
    torch.testing.assert_close(
        p_x.log_prob(torch.zeros(1, 1, 784)).item(), 1084.8, rtol=1e-4, atol=0
    )


def test_gaussian_learned_matches_torch():
    w, x = normal(2, 5, 6), normal(2, 5, 3, seed=1)
    p_x = make_head("gaussian-learned", 3)(w)
    expected = td.Normal(w[..., :3], p_x.scale)
    torch.testing.assert_close(p_x.log_prob(x), expected.log_prob(x).sum(-1), **EXACT)
    u = noises(2, 5, 3)
    torch.testing.assert_close(p_x.sample(u), expected.icdf(u), **EXACT)


def test_gaussian_learned_scale_is_bounded_and_keeps_its_gradient():
    raw = torch.tensor([-1e4, -30.0, 0.0, 30.0, 1e4], requires_grad=True)
    scale = make_head("gaussian-learned", 5)(
        torch.cat((torch.zeros(5), raw)).expand(1, 1, -1)
    ).scale.flatten()
    assert (scale >= 1e-3).all() and (scale <= 20).all() and (scale.diff() > 0).all()
    torch.testing.assert_close(scale[2].item(), math.sqrt(20e-3), rtol=1e-5, atol=0)
    (slope,) = torch.autograd.grad(scale.log().sum(), raw)
    assert (slope > 0).all()
    torch.testing.assert_close(slope[2].item(), 1.0, rtol=1e-5, atol=0)


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 1), st.floats(-40, 40))
def test_bernoulli_matches_cross_entropy(x, logit):
    log_prob = make_head("bernoulli", 1)(torch.full((1, 1, 1), logit)).log_prob(
        torch.full((1, 1, 1), x)
    )
    expected = -x * math.log1p(math.exp(-logit)) - (1 - x) * math.log1p(math.exp(logit))
    assert math.isclose(log_prob.item(), expected, rel_tol=1e-5, abs_tol=1e-30)


def test_bernoulli_matches_torch():
    w = normal(2, 5, 3) * 3
    p_x, expected = make_head("bernoulli", 3)(w), td.Bernoulli(logits=w)
    x = (normal(2, 5, 3, seed=1) > 0).float()
    torch.testing.assert_close(p_x.log_prob(x), expected.log_prob(x).sum(-1), **EXACT)
    torch.testing.assert_close(p_x.mean, expected.mean, **EXACT)


def test_bernoulli_gradient_at_zero_is_exact():
    w = torch.zeros(1, 1, 1, requires_grad=True)
    make_head("bernoulli", 1)(w).log_prob(torch.full((1, 1, 1), 0.8)).sum().backward()
    assert w.grad is not None and math.isclose(w.grad.item(), 0.8 - 0.5, rel_tol=1e-6)


def test_categorical_matches_torch():
    w = normal(3, 5, 11) * 3
    p_x, expected = make_head("categorical", 11)(w), td.Categorical(logits=w)
    for dtype in (torch.int64, torch.uint8):
        x = (torch.arange(15).view(3, 5) % 11).to(dtype)
        torch.testing.assert_close(p_x.log_prob(x), expected.log_prob(x.long()), **EXACT)
    assert torch.equal(p_x.mean, w.argmax(-1))


@pytest.mark.parametrize("bins", [2, 3, 256])
@pytest.mark.parametrize("spread", [0.3, 3.0, 30.0])
def test_logistic_mixture_matches_brute_force_and_sums_to_one(bins, spread):
    head = make_head("logistic-mixture", features=3, mixtures=4, bins=bins)
    p_x = head(normal(2, 3, head.size) * spread)
    x = grid(bins)[:, None, None, None].expand(bins, 2, 3, 3)
    mass = p_x.entry_log_prob(x).double().exp()
    torch.testing.assert_close(
        mass.sum(0), torch.ones(2, 3, 3, dtype=torch.float64), rtol=1e-5, atol=0
    )

    bounds = (torch.arange(1, bins).double() - 0.5) / (bins - 1)
    loc, scale, weight = p_x.loc.double(), p_x.scale.double(), p_x.logits.double().softmax(-1)
    cdf = (torch.sigmoid((bounds[:, None, None, None, None] - loc) / scale) * weight).sum(-1)
    cdf = torch.cat((torch.zeros(1, 2, 3, 3), cdf, torch.ones(1, 2, 3, 3)))
    torch.testing.assert_close(mass, cdf.diff(dim=0), rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(
        p_x.log_prob(x[-1]).double(), mass[-1].log().sum(-1), rtol=1e-5, atol=1e-5
    )

    exact = (mass * x.double()).sum(0)
    assert (p_x.mean - exact).abs().max() <= 0.5 / (bins - 1) + 1e-6


def test_logistic_mixture_is_exact_in_the_tails():
    # One component at 1/2 with the smallest scale: the level 0.25 is hundreds of scales away.
    head = make_head("logistic-mixture", features=1, mixtures=1)
    w = torch.tensor([0.0, 0.0, -1e6]).view(1, 1, 3).requires_grad_()
    p_x = head(w)
    log_prob = p_x.log_prob(torch.full((1, 1, 1), 64 / 255))
    bound = (64 + 0.5) / 255
    expected = (bound - 0.5) / p_x.scale.item() + math.log1p(-math.exp(-1 / 255 / p_x.scale.item()))
    assert math.isclose(log_prob.item(), expected, rel_tol=1e-5) and expected < -500
    log_prob.sum().backward()
    assert w.grad is not None and torch.isfinite(w.grad).all() and w.grad[0, 0, 1] < 0


def test_logistic_mixture_starts_spread_over_the_unit_interval():
    head = make_head("logistic-mixture", features=2, mixtures=4)
    p_x = head(torch.zeros(1, 1, head.size))
    torch.testing.assert_close(p_x.loc[0, 0, 1], torch.tensor([0.125, 0.375, 0.625, 0.875]))
    assert p_x.scale.min() > 0.05 and p_x.scale.max() < 0.2
    torch.testing.assert_close(p_x.mean, torch.full((1, 1, 2), 0.5))


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_have_the_moments_of_the_distribution(name, temperature):
    head = make_head(name, features=3, mixtures=2, bins=32)
    w, count = normal(1, 2, head.size, seed=2), 20_000
    x = head(w).sample(noises(count, 2, head.noise_size), temperature).double()
    p_x = head(w)
    if name.startswith("gaussian"):
        mean, variance = p_x.mean, (p_x.scale * temperature).square().expand_as(p_x.mean)
    elif name == "student-t":  # t with 4 degrees of freedom has variance 2
        mean, variance = p_x.mean, 2 * (p_x.scale * temperature).square()
    elif name == "bernoulli":
        mean = torch.sigmoid(w / temperature)
        variance = mean * (1 - mean)
    else:
        p_x.logits, p_x.scale = p_x.logits / temperature, p_x.scale * temperature
        levels = grid(32).view(32, 1, 1, 1).expand(32, 1, 2, 3)
        mass = p_x.entry_log_prob(levels).exp().movedim(0, -1)
        mean = (mass * grid(32)).sum(-1)
        variance = (mass * grid(32).square()).sum(-1) - mean.square()
        assert (x * 31 - (x * 31).round()).abs().max() < 1e-5
    error = (variance.double() / count).sqrt()[0]
    assert ((x.mean(0) - mean[0]).abs() < 5 * error).all()
    torch.testing.assert_close(x.var(0), variance[0].double(), rtol=0.06, atol=1e-4)


@pytest.mark.parametrize("name", ["gaussian", "gaussian-learned", "bernoulli", "categorical"])
def test_samples_rise_with_the_noise(name):
    head = make_head(name, features=6)
    w = normal(1, 1, head.size).expand(101, -1, -1)
    u = torch.linspace(1e-6, 1 - 1e-6, 101)[:, None, None].expand(-1, 1, head.noise_size)
    x = head(w).sample(u)
    assert (x.diff(dim=0) >= 0).all() and (x[0] < x[-1]).all()
    if name.startswith("gaussian"):
        torch.testing.assert_close(x[50], head(w).mean[50])


@pytest.mark.parametrize("name", HEADS)
def test_low_temperature_gives_the_mode(name):
    head = make_head(name, features=4, mixtures=1)
    w = normal(2, 3, head.size)
    if name == "logistic-mixture":
        w[..., 2::3] = -50.0  # narrow, or an open-ended edge bin could be the mode
    p_x = head(w)
    x = p_x.sample(noises(2, 3, head.noise_size), temperature=1e-5)
    mode = p_x.mean
    if name in HEADS_IN_UNIT:
        levels = grid(2 if name == "bernoulli" else 256)
        each = [p_x.entry_log_prob(level.expand(2, 3, 4)) for level in levels]
        mode = levels[torch.stack(each).argmax(0)]
    torch.testing.assert_close(x, mode, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match=r"^temperature is 0; it must be a positive number$"):
        p_x.sample(noises(2, 3, head.noise_size), temperature=0)


def test_categorical_samples_have_its_frequencies():
    w = normal(1, 1, 7) * 2
    x = make_head("categorical", 7)(w).sample(noises(20_000, 1, 1))
    assert x.shape == (20_000, 1)
    probs = w.flatten().softmax(0)
    frequency = x.flatten().bincount(minlength=7) / 20_000
    assert ((frequency - probs).abs() < 5 * (probs * (1 - probs) / 20_000).sqrt()).all()


@pytest.mark.parametrize(
    ("head", "x", "message"),
    [
        (
            "gaussian",
            torch.zeros(2, 5, 3),
            r"^prompt has shape \(2, 5, 3\); it must be \(batch, length, 28\)$",
        ),
        (
            "gaussian",
            torch.zeros(2, 28),
            r"^prompt has shape \(2, 28\); it must be \(batch, length, 28\)$",
        ),
        ("bernoulli", torch.zeros(2, 5, 28).long(), "^prompt has dtype int64; it must be a float$"),
        (
            "categorical",
            torch.zeros(2, 5, 28).long(),
            r"^prompt has shape .*; it must be \(batch, length\)$",
        ),
        ("categorical", torch.zeros(2, 5), "^prompt has dtype float32; it must be an integer$"),
        ("categorical", torch.zeros(2, 5).bool(), "^prompt has dtype bool; it must be an integer$"),
        (
            "categorical",
            torch.tensor([[0, 27], [3, 28]]),
            "^prompt is 28 at row 1, step 1; use 0 to 27$",
        ),
        (
            "categorical",
            torch.tensor([[0, -1]]),
            "^prompt is -1 at row 0, step 1; use 0 to 27$",
        ),
    ],
)
def test_validate_names_bad_input(head, x, message):
    with pytest.raises(ValueError, match=message):
        make_head(head, 28).validate(x, name="prompt")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_validate_finds_numbers_that_are_not_finite(value):
    x = torch.zeros(2, 5, 3)
    x[1, 3, 2] = value
    given = "x contains NaN or infinite values at row 1, step 3"
    message = rf"^{given}; use finite numbers up to 1e\+15$"
    with pytest.raises(ValueError, match=message):
        make_head("gaussian", 3).validate(x)


@pytest.mark.parametrize("head", ["bernoulli", "logistic-mixture"])
@pytest.mark.parametrize(
    ("value", "given"), [(1.5, "is 1.5"), (-0.1, "is -0.1"), (math.nan, "contains NaN .*")]
)
def test_heads_of_the_unit_interval_refuse_other_values(head, value, given):
    x = torch.rand(2, 5, 3)
    x[0, 0, :2] = torch.tensor([0.0, 1.0])
    make_head(head, 3).validate(x)  # grey values
    x[1, 3, 2] = value
    with pytest.raises(
        ValueError, match=rf"^x {given} at row 1, step 3; use 0 to 1 with head '{head}'$"
    ):
        make_head(head, 3).validate(x)


@pytest.mark.parametrize("head", ["bernoulli", "logistic-mixture"])
@pytest.mark.parametrize("size", [1.0, 30.0, 1e4])
def test_heads_of_the_unit_interval_accept_their_own_mean(head, size):
    own = make_head(head, 40)
    own.validate(own(normal(20, 50, own.size) * size).mean)


def test_validate_accepts_empty_sequences_where_told():
    for head, x in (
        ("gaussian", torch.zeros(2, 0, 3)),
        ("categorical", torch.zeros(2, 0, dtype=torch.int32)),
    ):
        make_head(head, 3).validate(x, steps=0)
        with pytest.raises(
            ValueError, match=r"x has shape \(2, 0.*\), no steps; it must have one step or more"
        ):
            make_head(head, 3).validate(x)
        with pytest.raises(
            ValueError, match=r"x has shape \(0, 0.*\), no sequences; it must have one sequence"
        ):
            make_head(head, 3).validate(x[:0], steps=0)


def test_latents_match_torch():
    p, q = normal(2, 5, 3, 7) * 3, normal(2, 5, 3, 7, seed=1) * 3
    latents, other = Latents(p), Latents(q)
    expected, expected_other = (
        td.Independent(td.Categorical(logits=v.double()), 1) for v in (p, q)
    )
    z = expected.sample()
    pairs = {
        "kl": (latents.kl(other), td.kl_divergence(expected, expected_other)),
        "log_prob": (latents.log_prob(z), expected.log_prob(z)),
        "kl_to_uniform": (latents.kl_to_uniform(), 3 * math.log(7) - expected.entropy()),
        "expected_log_prob": (
            other.expected_log_prob(latents),
            -expected.entropy() - td.kl_divergence(expected, expected_other),
        ),
    }
    for name, (value, reference) in pairs.items():
        assert value.shape == (2, 5), name
        torch.testing.assert_close(value.double(), reference, **EXACT, msg=name)
    assert torch.equal(latents.mode, p.argmax(-1))
    torch.testing.assert_close(latents.probs.double(), p.double().softmax(-1), **EXACT)


def test_latents_kl_vanishes_at_equality_and_detach_stops_gradients():
    logits = (normal(4, 3, 5) * 3).requires_grad_()
    latents = Latents(logits)
    assert latents.kl(latents).abs().max() < 1e-6
    assert Latents(torch.zeros(4, 3, 5)).kl_to_uniform().abs().max() < 1e-6
    latents.detach().kl_to_uniform()
    assert not latents.detach().logits.requires_grad and latents.kl_to_uniform().requires_grad


def test_latents_compute_in_float32_or_float64():
    logits = normal(2, 3, 5)
    assert Latents(logits.bfloat16()).kl_to_uniform().dtype == torch.float32
    assert Latents(logits.double()).kl_to_uniform().dtype == torch.float64


def test_latents_log_prob_broadcasts():
    logits, z = normal(1, 5, 3, 7), torch.arange(60).view(4, 5, 3) % 7
    torch.testing.assert_close(
        Latents(logits).log_prob(z), Latents(logits.expand(4, -1, -1, -1)).log_prob(z)
    )
    assert Latents(logits).log_prob(z[None].expand(2, -1, -1, -1)).shape == (2, 4, 5)


def test_latents_sample_frequencies_match():
    logits, count = normal(1, 2, 3, 6) * 2, 20_000
    for temperature in (1.0, 0.5):
        z = Latents(logits).sample(noises(count, 2, 3), temperature)
        probs = (logits[0] / temperature).softmax(-1)
        frequency = torch.nn.functional.one_hot(z, 6).float().mean(0)
        assert ((frequency - probs).abs() < 5 * (probs * (1 - probs) / count).sqrt() + 1e-6).all()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([-1e4, -200.0, -20.0, 0.0, 0.5]), min_size=1, max_size=9),
    st.booleans(),
)
def test_latents_sample_is_robust_at_the_ends(logits, low):
    # The smallest and largest noise, and float64 noise that rounds to 1 in float32.
    values = torch.tensor(logits).view(1, 1, 1, -1)
    probs = values.flatten().softmax(0)
    for u in (1e-45, 2.0**-24, 1e-9) if low else (1 - 2.0**-24, 1 - 1e-12):
        dtype = torch.float32 if u in (1e-45, 2.0**-24, 1 - 2.0**-24) else torch.float64
        z = Latents(values).sample(torch.full((1, 1, 1), u, dtype=dtype))
        assert 0 <= z.item() < len(logits) and probs[z.item()] > 0
    likely = (probs > 1e-6).nonzero()
    edge = 2.0**-24 if low else 1 - 2.0**-24
    assert (
        Latents(values).sample(torch.full((1, 1, 1), edge)).item()
        == likely[0 if low else -1].item()
    )


@pytest.mark.parametrize(
    ("logits", "noise"),
    [
        ((1, 5, 3, 7), (4, 5, 3)),
        ((4, 5, 3, 7), (2, 4, 5, 3)),
        ((1, 5, 3, 7), (2, 4, 5, 3)),
        ((1, 1, 3, 7), (4, 5, 3)),
        ((4, 1, 3, 7), (4, 5, 3)),
        ((4, 5, 3, 7), (1, 5, 3)),
        ((1, 1, 1, 7), (1, 1, 1)),
        ((3, 7), (3,)),
        ((4, 5, 3, 7), (4, 5, 3)),
        ((1, 5, 3, 7), (0, 5, 3)),
    ],
)
def test_latents_sample_broadcasts(logits, noise):
    values = normal(*logits) * 2
    u = torch.rand(noise, generator=torch.Generator().manual_seed(3))
    shape = torch.broadcast_shapes(noise, logits[:-1])
    z = Latents(values).sample(u)
    assert z.shape == shape and z.dtype == torch.int64
    # First class whose cumulative probability exceeds u, without the table in integers.
    cumulative = values.double().softmax(-1).cumsum(-1).expand(*shape, 7)
    assert torch.equal(z, (cumulative <= u[..., None]).sum(-1))
    assert torch.equal(z, Latents(values.expand(*shape, 7)).sample(u.expand(shape)))


def test_latents_sample_does_not_copy_shared_logits(monkeypatch):
    sizes = []
    search = torch.searchsorted
    monkeypatch.setattr(
        torch,
        "searchsorted",
        lambda table, *a, **k: sizes.append(table.numel()) or search(table, *a, **k),
    )
    Latents(normal(1, 28, 32, 32)).sample(noises(64, 28, 32))
    assert sizes == [28 * 32 * 32]


def test_latents_sample_accepts_slices():
    logits, u = normal(4, 6, 3, 7), noises(4, 6, 3)
    whole = Latents(logits).sample(u)
    assert torch.equal(Latents(logits[:, 2:]).sample(u[:, 2:]), whole[:, 2:])
    swapped = Latents(logits.transpose(0, 1)).sample(u.transpose(0, 1))
    assert torch.equal(swapped, whole.transpose(0, 1))


def test_rsample_is_one_hot_with_the_right_frequencies():
    logits, count = normal(1, 2, 5) * 2, 20_000
    noise = gumbel_uniform((count, 2, 5), generator=torch.Generator().manual_seed(0))
    z = Latents(logits).rsample(noise)
    assert ((z == 0) | (z == 1)).all() and (z.sum(-1) == 1).all()
    probs = logits[0].softmax(-1)
    assert ((z.mean(0) - probs).abs() < 5 * (probs * (1 - probs) / count).sqrt()).all()


def test_rsample_gradient_is_that_of_the_softmax():
    logits = normal(2, 4, 3, 5, dtype=torch.float64).requires_grad_()
    noise = gumbel_uniform((2, 4, 3, 5), generator=torch.Generator().manual_seed(0)).double()
    weight = normal(2, 4, 3, 5, seed=1, dtype=torch.float64)
    (hard,) = torch.autograd.grad((Latents(logits).rsample(noise) * weight).sum(), logits)
    soft = (logits - (-noise.log()).log()).softmax(-1)
    (expected,) = torch.autograd.grad((soft * weight).sum(), logits)
    torch.testing.assert_close(hard, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("u", [1e-45, 2.0**-25, 0.5, 1 - 2.0**-24])
def test_rsample_is_finite_for_extreme_logits_and_noise(dtype, u):
    logits = torch.tensor([[[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [1e4, 1e4, 1e4]]], dtype=dtype)
    logits.requires_grad_()
    noise = torch.full((1, 3, 3), u)
    noise[..., 1] = 0.5
    latents = Latents(logits)
    z = latents.rsample(noise)
    assert z.dtype == torch.float32 and (z.sum(-1) == 1).all() and ((z == 0) | (z == 1)).all()
    terms = (
        (z * normal(1, 3, 3)).sum()
        + latents.kl_to_uniform().sum()
        + latents.kl(latents.detach()).sum()
    )
    terms.backward()
    assert logits.grad is not None and torch.isfinite(terms) and torch.isfinite(logits.grad).all()


def test_gumbel_uniform_is_strictly_inside(monkeypatch):
    u = gumbel_uniform((1000,), "cpu", torch.Generator().manual_seed(0))
    assert torch.equal(u, gumbel_uniform((1000,), "cpu", torch.Generator().manual_seed(0)))
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / 1000) ** 0.5
    # The extremes of torch.rand: 0, and the largest float32 below 1.
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: torch.tensor([0.0, 1 - 2.0**-24]))
    ends = gumbel_uniform((2,))
    assert (ends > 0).all() and (ends < 1).all()
    assert torch.isfinite(ends.log()).all() and torch.isfinite((-ends.log()).log()).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_samples_agree_on_a_gpu():
    logits, u = normal(1, 28, 32, 32) * 3, noises(64, 28, 32)
    z = Latents(logits.cuda()).sample(u.cuda()).cpu()
    assert (
        z == Latents(logits).sample(u)
    ).float().mean() > 0.9999  # softmax rounds differently at edges
    for name in HEADS:
        head = make_head(name, features=5)
        w, u_x = normal(4, 6, head.size), noises(4, 6, head.noise_size)
        x = head(w).sample(u_x)
        torch.testing.assert_close(head(w.cuda()).sample(u_x.cuda()).cpu(), x, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            head(w.cuda()).log_prob(x.cuda()).cpu(), head(w).log_prob(x), rtol=1e-4, atol=1e-4
        )
