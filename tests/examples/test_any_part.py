"""The one-file model that conditions on any known part: it learns, and keeps to its masks."""

import torch

from tests.examples.test_minimal import load

any_part = load("any_part")


def noise(x, passes):
    generator = torch.Generator().manual_seed(2)
    u = torch.rand(passes, len(x), any_part.STEPS, any_part.LATENTS, generator=generator)
    return u, torch.rand(x.shape, generator=generator)


def test_what_is_known_stays_and_what_is_unknown_is_not_read():
    torch.manual_seed(1)
    model, x = any_part.VSSM(), any_part.digits()[1][:5]
    known = torch.rand_like(x) < 0.6
    u, order = noise(x, 3)
    made = any_part.fill(model, x * known, known, u, order)
    assert torch.equal(made[known], x[known])
    other = any_part.fill(model, torch.where(known, x, 9.0), known, u, order)
    torch.testing.assert_close(made, other)
    assert not torch.allclose(made, any_part.fill(model, x * known, known, u[:1], order))


def test_masks_are_apart_and_passes_divide_the_unknown():
    torch.manual_seed(1)
    K, R, S = any_part.masks(torch.zeros(50, any_part.STEPS, any_part.FEATURES))
    assert not (K & R).any() and R.any() and K.any() and set(S.tolist()) <= {1, 2, 4, 8, 16}
    part = any_part.parts(~K, torch.rand(K.shape), S)
    assert torch.equal(part < 0, K)
    sizes = torch.stack([(part[S == 4] == s).sum((1, 2)) for s in range(4)])
    assert (sizes.max(0).values - sizes.min(0).values).max() <= 1


def test_the_likelihood_of_a_part_is_bounded_by_the_objective():
    """One draw of the estimate has the expectation of the ELBO; many draws lie above it."""
    torch.manual_seed(1)
    model, x = any_part.VSSM(), any_part.digits()[1][:4]
    K = torch.rand_like(x) < 0.5
    u, _ = noise(x, 24)
    many = any_part.log_likelihood(model, x, u, K)
    one = torch.stack([any_part.log_likelihood(model, x, u_k[None], K) for u_k in u]).mean(0)
    assert (many > one).all()


def test_main_trains_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    any_part.main(steps=3, n=2)
    out = capsys.readouterr().out
    assert "hole" in out and (tmp_path / "any_part.png").stat().st_size > 1000
