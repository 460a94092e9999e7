"""Objectives and likelihoods against enumeration: T = 3, Z = 1, N = 2 has eight sequences."""

import itertools
import math
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.conftest import KINDS, relative_error, sequences, small_model
from vssm import log_likelihood, objective
from vssm.distributions import Latents

TINY = {"latents": 1, "classes": 2, "sigma": 1.0}


def all_latents():
    """Every z_{1:3} of one binary component, (8, 3, 1)."""
    return torch.tensor(list(itertools.product((0, 1), repeat=3)))[..., None]


def joint_by_enumeration(model, x, prior, first=0):
    """log sum_z p(x_{first+1:T}|z) prior(z) for one sequence x (1, 3, D)."""
    z = all_latents()
    p_x, _ = model.likelihood(z)
    log_p = p_x.log_prob(x.expand(8, -1, -1))[:, first:].sum(1)
    return torch.logsumexp(log_p + prior.log_prob(z).sum(1), 0)


def expected_elbo(model, x):
    """The ELBO with the expectation over z taken by enumeration."""
    z = all_latents()
    q_z, _ = model.posterior(x)
    log_q = q_z.log_prob(z).sum(1)
    log_p = model.likelihood(z)[0].log_prob(x.expand(8, -1, -1)).sum(1) - 3 * math.log(2)
    return (log_q.exp() * (log_p - log_q)).sum()


@pytest.mark.parametrize("kind", ["tvae", "vssm"])
@torch.no_grad()
def test_likelihood_converges_to_enumeration(kind):
    model = small_model(kind, **TINY)
    x = torch.randn(1, 3, 3)
    uniform = Latents(torch.zeros(1, 3, 1, 2))
    exact = joint_by_enumeration(model, x, uniform)
    assert expected_elbo(model, x) <= exact + 1e-6
    assert abs(log_likelihood(model, x, num_samples=8000) - exact) < 0.08

    empty, _ = model.partial_posterior(empty=3)
    exact = joint_by_enumeration(model, x, empty)
    assert abs(log_likelihood(model, x, num_samples=8000, prior="partial") - exact) < 0.08

    q_partial, _ = model.partial_posterior(x[:, :2], empty=1)
    exact = joint_by_enumeration(model, x, q_partial, first=2)
    assert abs(log_likelihood(model, x, num_samples=8000, prompt_length=2) - exact) < 0.08


@torch.no_grad()
def test_vrnn_likelihood_converges_to_enumeration():
    model = small_model("vrnn", **TINY)
    x = torch.randn(1, 3, 3)

    def exact(length):
        z = all_latents()[: 2**length, 3 - length :]
        path = model(x[:, :length].expand(len(z), -1, -1), draw=lambda t, q_z: z[:, t, None])
        log_p = path.p_x.log_prob(x[:, :length].expand(len(z), -1, -1)) + path.p_z.log_prob(z)
        return torch.logsumexp(log_p.sum(1), 0)

    assert abs(log_likelihood(model, x, num_samples=8000) - exact(3)) < 0.08
    partial = log_likelihood(model, x, num_samples=8000, prompt_length=2)
    assert abs(partial - (exact(3) - exact(2))) < 0.08


@pytest.mark.parametrize("kind", ["tvae", "vrnn", "vssm"])
@torch.no_grad()
def test_elbo_estimates_lie_below_the_likelihood(kind):
    """On average, the ELBO <= the estimate with K = 10 <= the estimate with K = 1000."""
    model = small_model(kind, latents=2, classes=3, sigma=1.0)
    x = torch.randn(64, 4, 3)
    terms = [objective(model, x) for _ in range(50)]
    elbo = torch.stack([t.reconstruction - t.kl for t in terms]).mean()
    few, many = (log_likelihood(model, x, num_samples=k).mean() for k in (10, 1000))
    assert elbo < few < many + 1e-3


@torch.no_grad()
def test_single_draw_objective_is_unbiased_for_the_elbo():
    model = small_model("vssm", **TINY)
    x = torch.randn(1, 3, 3)
    terms = objective(model, x.expand(20000, -1, -1))
    assert abs((terms.reconstruction - terms.kl).mean() - expected_elbo(model, x)) < 0.08


@pytest.mark.parametrize("kind", KINDS)
def test_terms_add_up_and_do_not_alias(kind):
    model = small_model(kind)
    terms = objective(model, sequences(model, 4, 5))
    assert relative_error(terms.loss, -(terms.reconstruction - terms.kl + terms.partial)) < 1e-6
    pointers = {term.data_ptr() for term in terms}
    assert len(pointers) == 4
    assert (terms.kl >= 0).all()
    assert (terms.partial <= 0).all()


def test_partial_term_teaches_the_partial_posterior_alone():
    model = small_model("vssm")
    objective(model, sequences(model, 4, 5)).partial.sum().backward()
    trained = {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {"partial"}


def test_objective_follows_its_generator():
    model = small_model("vssm")
    x = sequences(model, 4, 5)
    first, second = (objective(model, x, torch.Generator().manual_seed(7)).loss for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, objective(model, x, torch.Generator().manual_seed(8)).loss)


@pytest.mark.parametrize("kind", ["transformer", "ssm", "rnn"])
def test_autoregressive_likelihood_is_exact_and_splits(kind):
    model = small_model(kind)
    x = torch.rand(3, 6, 3)
    full = log_likelihood(model, x)
    assert torch.allclose(full, objective(model, x).reconstruction, rtol=1e-5)
    first = log_likelihood(model, x[:, :2])
    assert torch.allclose(full, first + log_likelihood(model, x, prompt_length=2), rtol=1e-4)


@pytest.mark.parametrize("kind", ["vrnn", "vssm"])
def test_likelihood_does_not_depend_on_the_batch_split(kind, monkeypatch):
    """Streaming over K in other portions gives the same estimate."""
    model = small_model(kind)
    x = torch.rand(3, 4, 3)
    whole = log_likelihood(model, x, num_samples=10, prompt_length=2)
    monkeypatch.setattr("vssm.likelihoods._ROWS_PER_PASS", 3)
    assert torch.allclose(
        whole, log_likelihood(model, x, num_samples=10, prompt_length=2), rtol=1e-4
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x: log_likelihood(m, x, num_samples=0), "num_samples is 0; it must be"),
        (
            lambda m, x: log_likelihood(m, x, prompt_length=7),
            "prompt_length is 7; it must be 0 to 6",
        ),
        (lambda m, x: log_likelihood(m, x, prior="normal"), "prior='normal' is unknown"),
        (
            lambda m, x: log_likelihood(m, x[0]),
            r"x has shape \(6, 3\); it must be \(batch, length, 3\)",
        ),
        (
            lambda m, x: objective(m, x[..., :2]),
            r"x has shape \(2, 6, 2\); it must be \(batch, length, 3\)",
        ),
        (lambda m, x: objective(m, x.int()), "x has dtype int32"),
        (
            lambda m, x: objective(m, x * math.nan),
            "x contains NaN or infinite values at row 0, step 0",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(small_model("vssm"), torch.rand(2, 6, 3))


def test_tokens_outside_the_vocabulary_are_named():
    with pytest.raises(ValueError, match="x is 5 at row 0, step 1; use 0 to 4"):
        objective(small_model("ssm", "categorical"), torch.tensor([[0, 5]]))


@pytest.mark.parametrize(
    "options", [{"kind": "vssm"}, {"kind": "vrnn"}, {"kind": "vssm", "levels": 3}], ids=str
)
def test_the_weight_of_the_kl_changes_the_loss_alone(options):
    model = small_model(**options)
    x = sequences(model, 3, 5)

    def terms(weight):
        return objective(model, x, torch.Generator().manual_seed(2), kl_weight=weight)

    plain, none, one = terms(None), terms(torch.tensor(0.0)), terms(torch.tensor(1.0))
    assert relative_error(one.loss, plain.loss) < 1e-6
    for a, b in zip(none[1:], plain[1:], strict=True):
        assert torch.equal(a, b)
    assert (none.loss < plain.loss).all() and (plain.kl > 0).all()
    if "levels" not in options:
        assert relative_error(none.loss, -(plain.reconstruction + plain.partial)) < 1e-6


@pytest.mark.parametrize("lengths", [[4], [2, 4]], ids=str)
@pytest.mark.parametrize("levels", [1, 2])
def test_cuts_are_all_that_the_documentation_says(levels, lengths, monkeypatch):
    """From nothing to everything; a ladder always knows a step and always has one to explain."""
    model = small_model("vssm", levels=levels, latents=4, width=8, layers=1)
    name, seen = "partial_posterior" if levels == 1 else "task", []
    real = getattr(model, name)

    def watched(x, cut, *rest, **options):
        seen.append(cut[-len(x) :])
        return real(x, cut, *rest, **options)

    monkeypatch.setattr(model, name, watched)
    given = torch.tensor(lengths).repeat(300 // len(lengths))
    objective(model, torch.rand(300, 4, 3), lengths=given if len(lengths) > 1 else None)
    for length in lengths:
        own = set(seen[0][given == length].tolist())
        assert own == set(range(length + 1) if levels == 1 else range(1, length))


def test_the_weight_of_the_kl_counts_for_both_bounds_of_a_ladder(monkeypatch):
    """With a KL of 1 for each: two steps at two levels, and the one step after the cut again."""
    model = small_model("vssm", levels=2, latents=4)
    real = Latents.rsample_and_kl

    def constant(q_z, *rest):
        z, kl = real(q_z, *rest)
        return z, torch.ones_like(kl)

    monkeypatch.setattr(Latents, "rsample_and_kl", constant)
    x = sequences(model, 3, 2)
    none, once = (
        objective(model, x, torch.Generator().manual_seed(0), kl_weight=w).loss for w in (0, 1)
    )
    torch.testing.assert_close(once - none, torch.full((3,), 6.0))


@torch.no_grad()
def test_the_kl_of_a_vrnn_is_from_its_prior_to_its_posterior():
    model = small_model("vrnn")
    x = sequences(model, 3, 1)  # whose only latents do not depend on a draw
    h = model.memory(3)
    q, p = model.posterior(h, x).log_probs, model.prior(h).log_probs
    expected = (q.exp() * (q - p)).sum((1, 2, 3))
    assert relative_error(objective(model, x).kl, expected) < 1e-5
    assert relative_error((p.exp() * (p - q)).sum((1, 2, 3)), expected) > 1e-2


@pytest.mark.parametrize("kind", ["vssm", "vrnn"])
def test_the_seed_names_the_draws_of_an_estimate(kind):
    model = small_model(kind)
    x = sequences(model, 3, 4)
    first, again, other = (log_likelihood(model, x, 2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.isclose(first, other).any()


@pytest.mark.parametrize("levels", [1, 2])
@torch.no_grad()
def test_shards_of_a_ragged_batch_are_parts_of_the_whole(levels):
    model = small_model("vssm", levels=levels, latents=4)
    x, lengths = sequences(model, 6, 5), torch.tensor([5, 1, 3, 2, 5, 4])

    def terms(rows, shard):
        generator = torch.Generator().manual_seed(3)
        return torch.stack(objective(model, x[rows], generator, shard, lengths[rows]))

    parts = [terms(slice(2 * i, 2 * i + 2), (i, 3)) for i in range(3)]
    torch.testing.assert_close(
        torch.cat(parts, 1), terms(slice(None), (0, 1)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "options", [{"kind": kind} for kind in KINDS] + [{"kind": "vssm", "levels": 3}]
)
def test_activations_can_be_checkpointed(options):
    model = small_model(**options)
    x, weights = sequences(model, 2, 5), list(model.parameters())

    def loss():
        return objective(model, x, torch.Generator().manual_seed(0)).loss.mean()

    wanted = torch.autograd.grad(loss(), weights)
    given = torch.autograd.grad(checkpoint(loss, use_reentrant=False), weights)
    assert all(torch.equal(a, b) for a, b in zip(given, wanted, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler looks at it
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "options", [{"kind": kind} for kind in KINDS] + [{"kind": "vssm", "levels": 3}]
)
def test_a_compiled_model_is_compiled_or_warned_about(options, in_place):
    model, graphs = small_model(**options), []
    x = sequences(model, 2, 4)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    if in_place:
        model.compile(backend=backend)
        compiled = model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        objective(compiled, x)
    told = [str(w.message) for w in caught if "has no effect on a " in str(w.message)]
    assert len(told) == (not graphs), "warned exactly where nothing was compiled"
    assert all("--train.compile" in text and "\n" not in text for text in told)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler looks at it
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_function_around_it_gives_the_same(kind):
    model = small_model(kind)
    x = sequences(model, 3, 6)

    def loss(x):
        return objective(model, x).loss.mean()

    compiled, found = torch.compile(loss, backend="eager"), []
    for function in (loss, compiled):
        torch.manual_seed(3)
        model.zero_grad()
        value = function(x)
        value.backward()
        found.append((value, [p.grad for p in model.parameters() if p.grad is not None]))
    (value, gradients), (other, others) = found
    torch.testing.assert_close(other, value)
    torch.testing.assert_close(others, gradients)
