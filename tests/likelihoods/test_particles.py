"""The particle filter against enumeration, against importance sampling, and with bad input."""

import numpy as np
import pytest
import torch

from tests.conftest import sequences, small_model
from tests.test_objectives import TINY, all_latents, joint_by_enumeration
from vssm import likelihoods, log_likelihood
from vssm.distributions import Latents

UNEVEN = {**TINY, "sigma": 0.5}  # so that few draws have most of the weight


@pytest.fixture(autouse=True)
def large_passes(monkeypatch):
    monkeypatch.setattr(likelihoods, "_ROWS_PER_PASS", 20_000)


def mean_ratio(model, x, exact, **options):
    """The mean over 10,000 estimates of p(x), divided by p(x), and its standard error."""
    many = x.expand(10_000, -1, -1)
    found = log_likelihood(model, many, num_samples=4, method="particles", **options)
    assert not torch.allclose(
        found, log_likelihood(model, many, num_samples=4, **options), atol=1e-3
    )
    ratio = (found.double() - exact).exp()
    return float(ratio.mean()), float(ratio.std() / len(ratio) ** 0.5)


@pytest.mark.parametrize("kind", ["tvae", "vssm"])
@torch.no_grad()
def test_estimates_have_the_likelihood_as_their_mean(kind):
    model = small_model(kind, **UNEVEN)
    x = 0.5 * torch.randn(1, 3, 3)
    uniform = Latents(torch.zeros(1, 3, 1, 2))
    empty, _ = model.partial_posterior(empty=3)
    prompted, _ = model.partial_posterior(x[:, :2], empty=1)
    for prior, first, options in (
        (uniform, 0, {}),
        (empty, 0, {"prior": "partial"}),
        (prompted, 2, {"prompt_length": 2}),
    ):
        mean, error = mean_ratio(model, x, joint_by_enumeration(model, x, prior, first), **options)
        assert error < 0.05 and abs(mean - 1) < 4 * error


@torch.no_grad()
def test_estimates_of_a_vrnn_have_the_likelihood_as_their_mean():
    model = small_model("vrnn", **UNEVEN)
    x, z = 0.5 * torch.randn(1, 3, 3), all_latents()
    path = model(x.expand(8, -1, -1), draw=lambda t, q_z: z[:, t, None])
    log_p = path.p_x.log_prob(x.expand(8, -1, -1)) + path.p_z.log_prob(z)
    mean, error = mean_ratio(model, x, torch.logsumexp(log_p.sum(1), 0))
    assert error < 0.05 and abs(mean - 1) < 4 * error
    first, second = (torch.logsumexp(log_p[..., :steps].sum(1), 0) for steps in (2, 3))
    first = first - torch.log(torch.tensor(2.0))  # every z_{1:2} is there twice
    found = log_likelihood(model, x, num_samples=8000, prompt_length=2, method="particles")
    assert abs(found - (second - first)) < 0.08


@pytest.mark.parametrize("kind", ["tvae", "vrnn", "vssm"])
@torch.no_grad()
def test_closer_than_importance_sampling_with_as_many_draws(kind):
    model = small_model(kind, latents=2, classes=4, sigma=0.5)
    x = torch.randn(16, 20, 3)
    by = {
        method: log_likelihood(model, x, num_samples=16, method=method)
        for method in likelihoods.METHODS
    }
    many = log_likelihood(model, x, num_samples=500)
    assert by["importance"].mean() + 2 < by["particles"].mean()
    assert many.mean() < by["particles"].mean() + 2  # even with so many


@pytest.mark.parametrize("kind", ["tvae", "vrnn", "vssm"])
@torch.no_grad()
def test_one_draw_is_that_of_importance_sampling(kind):
    model = small_model(kind)
    x = sequences(model, 3, 5)
    one, other = (
        log_likelihood(model, x, 1, 2, seed=3, method=method) for method in likelihoods.METHODS
    )
    assert torch.allclose(one, other, rtol=1e-4)


@pytest.mark.parametrize("kind", ["vrnn", "vssm"])
@torch.no_grad()
def test_what_a_pass_holds_does_not_matter(kind, monkeypatch):
    model = small_model(kind, latents=2, classes=4, sigma=0.5)
    x = sequences(model, 5, 6)
    together = log_likelihood(model, x, 8, 2, seed=3, method="particles")
    monkeypatch.setattr(likelihoods, "_ROWS_PER_PASS", 1)
    assert torch.allclose(
        together, log_likelihood(model, x, 8, 2, seed=3, method="particles"), rtol=1e-4
    )
    assert not torch.allclose(
        together, log_likelihood(model, x, 8, 2, seed=4, method="particles"), rtol=1e-4
    )


@pytest.mark.parametrize("kind", ["tvae", "vrnn", "vssm"])
@torch.no_grad()
def test_padding_does_not_matter(kind):
    model = small_model(kind, latents=2, classes=4, sigma=0.5)
    x, lengths = sequences(model, 3, 6), torch.tensor([6, 3, 2])
    padded = torch.where(torch.arange(6)[:, None] < lengths[:, None, None], x, 9.0)
    first, second = (
        log_likelihood(model, y, 8, 1, lengths=lengths, method="particles") for y in (x, padded)
    )
    assert torch.allclose(first, second, rtol=1e-5)
    alone = log_likelihood(model, x[:1], 8, 1, method="particles")  # the first row has no padding
    assert torch.allclose(first[:1], alone, rtol=1e-4)


def test_bad_methods_are_named():
    x = torch.zeros(1, 4, 3)
    with pytest.raises(
        ValueError,
        match=r"^method='particle' is unknown; choose from 'importance', 'particles'",
    ):
        log_likelihood(small_model("vssm"), x, method="particle")
    with pytest.raises(ValueError, match=r"^method='particles' is not for models with levels or"):
        log_likelihood(small_model("vssm", levels=3), x, method="particles")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tvae", "vrnn", "vssm"])
@torch.no_grad()
def test_on_a_gpu_as_on_a_cpu(kind):
    model = small_model(kind, latents=2, classes=4, sigma=0.5)
    x = torch.randn(64, 12, 3)
    for options in ({}, {"prompt_length": 5}):
        here = log_likelihood(model.cpu(), x, 32, method="particles", **options)
        there = log_likelihood(model.cuda(), x.cuda(), 32, method="particles", **options).cpu()
        # Rounding may choose other particles, so that single estimates differ.
        assert (here - there).abs().median() < 0.5 and abs(here.mean() - there.mean()) < 0.5


@pytest.mark.parametrize("method", ["importance", "particles"])
@pytest.mark.parametrize("kind", ["tvae", "vrnn", "vssm"])
def test_parts_of_a_batch_have_the_estimates_of_the_whole(kind, method):
    model = small_model(kind)
    x = sequences(model, 5, 6)
    whole = log_likelihood(model, x, 4, method=method, seed=3)
    parts = [
        log_likelihood(model, x[rows], 4, method=method, seed=3, rows=rows)
        for rows in ([0, 3], torch.tensor([4, 1]), [2])
    ]
    same = log_likelihood(model, x[3:], 4, method=method, seed=3, rows=np.int64(3))
    assert torch.allclose(same, whole[3:], rtol=1e-4)
    assert torch.allclose(torch.cat(parts), whole[[0, 3, 4, 1, 2]], rtol=1e-4)
    for rows in ([0], [0.5] * 5, [0, 1, 2, 3, -1], [0, 1, 2, 3, 2**32], -1, 2**32 - 4, True, None):
        with pytest.raises(
            ValueError, match=r"rows (do not fit|is|has) .*; it must hold (64-bit|5) whole numbers"
        ):
            log_likelihood(model, x, 4, method=method, rows=rows)


@pytest.mark.parametrize("kind", ["vssm", "tvae", "vrnn"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_both_estimates_have_one_type(kind, dtype):
    model, x = small_model(kind).to(dtype), torch.rand(2, 4, 3, dtype=dtype)
    found = {
        log_likelihood(model, x, 2, method=method).dtype for method in ("importance", "particles")
    }
    assert found == {torch.float64 if dtype == torch.float64 else torch.float32}
