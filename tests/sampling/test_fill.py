"""Any part known: exactness by enumeration, and one sample for one seed."""

import itertools
import math

import pytest
import torch

import vssm
from tests.conftest import small_model
from vssm.models.anypart import Part, interpolate


def any_part(seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"features": 2, "width": 8, "layers": 2, "latents": 2, "classes": 2, "levels": 2}
    config = vssm.ModelConfig(known="any", **{**sizes, "window": 4, "state_size": 4, **options})
    model = vssm.build(config).eval()
    with torch.no_grad():  # so that priors are far from uniform
        for level in range(config.levels):
            model.rung(level).prior_and_query.weight.mul_(4)
        if config.interpolate:  # fresh weights say nothing but the lines
            model.out.weight.normal_(std=0.1)
    return model


def random_case(seed, rows=1, length=3, features=2):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, length, features, generator=generator).round()
    return x, torch.rand(rows, length, features, generator=generator) < 0.5


@torch.no_grad()
def exact(model, x, known):
    """Sums p(x_R | z, x_K) p(z | x_K) over all live latents."""
    part = Part(*(model.pad(values) for values in (x, known, ~known)))
    lives = [part.live_latents(span) for span in model.spans]
    latents = model.config.latents // model.config.levels
    count = latents * sum(int(live.sum()) for live in lives)
    total = []
    for classes in itertools.product(range(2), repeat=count):
        z, rest, log_p_z = [], list(classes), 0.0
        for live in lives:
            z.append(torch.zeros(*live.shape, latents, dtype=torch.int64))
            for place in live[0].nonzero().flatten().tolist():
                z[-1][0, place] = torch.tensor([rest.pop() for _ in range(latents)])

        def draw(level, p_z, query, z=z):
            nonlocal log_p_z
            log_p_z += float(torch.where(lives[level], p_z.log_prob(z[level]), 0).sum())
            return z[level]

        p_x, _ = model.descend(part, draw)
        total.append(log_p_z + float(model.score(p_x, part.x, part.made)[0]))
    return torch.tensor(total, dtype=torch.float64).logsumexp(0).item()


NUMBERS = {"head": "student-t", "interpolate": True}


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, {"head": "bernoulli"}),
        (1, {"head": "bernoulli"}),
        (2, {"head": "bernoulli", "spans": (4, 1)}),
        (3, {"head": "bernoulli", "spans": (2, 2)}),
        (4, NUMBERS),
        (5, {**NUMBERS, "spans": (4, 1), "season": 2}),
    ],
)
def test_likelihood_of_a_part_converges_to_the_sum_over_all_latents(seed, options):
    model = any_part(seed, **options)
    x, known = random_case(seed)
    estimate = vssm.log_likelihood(model, x, num_samples=20_000, known=known, seed=seed)
    assert math.isclose(float(estimate), exact(model, x, known), abs_tol=0.03)


def test_samples_follow_the_enumerated_law():
    model = any_part(head="bernoulli")
    x, known = random_case(3)
    known[:] = True
    known[0, 1] = False
    made = vssm.fill(model, x, known, num=8000, observe="sample")[0]
    for values in itertools.product((0.0, 1.0), repeat=2):
        x[0, 1] = torch.tensor(values)
        p = math.exp(exact(model, x, known))
        share = float((made[:, 1] == x[0, 1]).all(-1).float().mean())
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / 8000) + 1e-3


def test_passes_without_latents_have_a_normalised_law():
    model = any_part(head="bernoulli", latent_passes=2)
    values = torch.tensor(list(itertools.product((0.0, 1.0), repeat=4))).view(16, 2, 2)
    known = torch.zeros_like(values, dtype=torch.bool)
    rows = torch.full((16,), 7)  # one order of the entries for all
    nats = vssm.log_likelihood(model, values, num_samples=1, known=known, passes=4, rows=rows)
    assert math.isclose(float(nats.exp().sum()), 1, rel_tol=1e-5)


def test_samples_of_passes_without_latents_follow_their_law():
    model = any_part(head="bernoulli", latent_passes=1)
    x, known = random_case(3)
    known[:] = True
    known[0, 1] = False
    made = vssm.fill(model, x, known, num=8000, passes=2, observe="sample")[0]
    for values in itertools.product((0.0, 1.0), repeat=2):
        x[0, 1] = torch.tensor(values)
        copies, masks = (v.expand(2000, -1, -1) for v in (x, known))  # in many orders
        p = float(vssm.log_likelihood(model, copies, known=masks, passes=2).exp().mean())
        share = float((made[:, 1] == x[0, 1]).all(-1).float().mean())
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / 8000) + 5e-3


@pytest.mark.parametrize("latent_passes", [0, 1, 4])
def test_the_objective_counts_every_unknown_entry_once_in_expectation(latent_passes):
    """Each entry costs log 5 in a model that says nothing, so the loss counts entries."""
    sizes = {"features": 5, "head": "categorical", "window": 8, "latent_passes": latent_passes}
    model = any_part(**sizes)
    with torch.no_grad():
        model.out.weight.zero_()
        model.out.bias.zero_()
    torch.manual_seed(0)
    x = torch.zeros(20_000, 8, dtype=torch.int64)
    counts = -vssm.objective(model, x).reconstruction.detach() / math.log(5)
    # Nothing is known with probability 0.35; else half of 8 steps, or a block of 1 to 8 of them.
    expected = 0.35 * 8 + (0.2 + 0.3) * 4 + 0.15 * 4.5
    assert abs(float(counts.mean()) - expected) < 4 * float(counts.std()) / math.sqrt(20_000)


@pytest.mark.parametrize("interpolate", [False, True])
def test_known_entries_come_back_bit_for_bit_and_nan_is_unknown(interpolate):
    model = any_part(features=3, interpolate=interpolate)
    x, known = random_case(1, rows=4, length=10, features=3)
    x = x + torch.rand_like(x)
    holes = torch.where(known, x, torch.nan)
    made = vssm.fill(model, holes, passes=3)
    assert torch.equal(made[known], x[known]) and made.isfinite().all()
    assert torch.equal(made, vssm.fill(model, x, known, passes=3))
    assert not torch.equal(made, vssm.fill(model, x, known, passes=3, seed=1))


@pytest.mark.parametrize("options", [{}, NUMBERS], ids=str)
@pytest.mark.parametrize("passes", [1, 3])
def test_a_batch_split_does_not_change_a_sample(passes, options):
    model = any_part(**options)
    x, known = random_case(2, rows=5, length=9)
    whole = vssm.fill(model, x, known, passes=passes)
    part = vssm.fill(model, x[2:4], known[2:4], passes=passes, rows=[2, 3])
    torch.testing.assert_close(whole[2:4], part)


@pytest.mark.parametrize(
    ("passes", "options"),
    [
        (1, {}),
        (3, {}),
        (2, {"spans": (4, 2)}),
        (3, {"latent_passes": 2}),
        (1, NUMBERS),
        (3, {**NUMBERS, "latent_passes": 2, "season": 2}),
    ],
)
@pytest.mark.parametrize("prompted", [False, True])
def test_chunks_and_resume_points_do_not_change_a_sample(passes, options, prompted):
    model = any_part(**options)
    options = {"passes": passes, "seed": 5}
    start = {"prompt": random_case(4, rows=2, length=6)[0]} if prompted else {"num": 2}
    whole = vssm.generate(model, length=11, **start, **options)
    chunked = vssm.generate(model, length=11, chunk=4, **start, **options)
    torch.testing.assert_close(whole.x, chunked.x)
    for cut in (1, 2, 5, 8):
        first = vssm.generate(model, length=cut, **start, **options)
        rest = vssm.generate(model, length=11 - cut, state=first.state, passes=passes)
        torch.testing.assert_close(whole.x, torch.cat([first.x, rest.x], 1))
        assert torch.equal(whole.z, torch.cat([first.z, rest.z], 1))


@pytest.mark.parametrize("options", [{}, NUMBERS], ids=str)
def test_a_prompt_is_the_prefix_of_fill(options):
    model = any_part(**options)
    prompt = random_case(6, rows=2, length=6)[0]
    made = vssm.generate(model, prompt=prompt, length=10, seed=3)
    x = torch.cat([prompt, torch.full((2, 10, 2), torch.nan)], 1)
    with pytest.warns(UserWarning, match="a gap of 10 steps, .* saw 4 .* extrapolation"):
        filled = vssm.fill(model, x, seed=3)
    torch.testing.assert_close(made.x, filled[:, 6:])


@pytest.mark.parametrize("options", [{}, NUMBERS], ids=str)
def test_observed_in_pieces_is_observed_at_once(options):
    model = any_part(**options)
    x = random_case(7, rows=2, length=7)[0]
    pieces = vssm.observe(model, x[:, 5:], vssm.observe(model, x[:, :5]))
    resumed = vssm.generate(model, length=6, state=pieces)
    torch.testing.assert_close(resumed.x, vssm.generate(model, prompt=x, length=6).x)


@pytest.mark.parametrize("options", [{}, NUMBERS, {**NUMBERS, "season": 2}], ids=str)
def test_missing_cells_change_neither_terms_nor_likelihoods(options):
    model = any_part(**options)
    x, there = random_case(8, rows=4, length=8)
    other = torch.where(there, x, 99.0)
    terms = [
        vssm.objective(model, values, torch.Generator().manual_seed(1), known=mask)
        for values, mask in ((torch.where(there, x, torch.nan), None), (other, there))
    ]
    assert torch.equal(terms[0].loss, terms[1].loss)


@pytest.mark.parametrize(
    "options",
    [{}, {"spans": (4, 1)}, {"spans": (4, 2)}, {"interpolate": True, "season": 2}],
    ids=str,
)
def test_every_weight_has_a_gradient(options):
    model = any_part(given=1, features=3, **options)
    loss = sum(vssm.objective(model, torch.rand(16, 8, 3)).loss.mean() for _ in range(3))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_an_untrained_model_that_interpolates_fills_with_straight_lines():
    sizes = {"width": 8, "layers": 1, "latents": 2, "classes": 2, "window": 6}
    model = vssm.build(vssm.ModelConfig(features=2, known="any", interpolate=True, **sizes))
    x = torch.full((1, 12, 2), torch.nan)
    x[0, [1, 4, 9], 0] = torch.tensor([2.0, 5.0, -1.0])  # level beyond them, in each window
    x[0, 7, 1] = 3.0  # nothing is known in its first window
    made = vssm.fill(model, x)[0].T
    lines = [[2.0, 2, 3, 4, 5, 5] + [-1] * 6, [0.0] * 6 + [3] * 6]
    torch.testing.assert_close(made, torch.tensor(lines))


def test_lines_of_a_season_go_through_the_same_step_of_each_season():
    x = torch.tensor([[1.0, 10.0, 0.0, 0.0, 3.0, 0.0, 50.0, 0.0]])[..., None]
    known = torch.tensor([[1, 1, 0, 0, 1, 0, 1, 0]], dtype=torch.bool)[..., None]
    line, _ = interpolate(x, known, window=8, season=2)
    assert line.flatten().tolist() == [1, 10, 2, 10, 3, 10, 50, 10]
    apart, _ = interpolate(x, known, window=4, season=2, otherwise=x - 7)
    assert apart.flatten().tolist() == [1, 10, 1, 10, 3, -7, 50, -7]


def test_what_interpolates_needs_numbers_of_which_any_part_is_known():
    sizes = {"features": 2, "width": 8, "layers": 1, "latents": 2, "classes": 2}
    with pytest.raises(ValueError, match="interpolate=True needs known='any'"):
        vssm.ModelConfig(interpolate=True, **sizes)
    for head in ("categorical", "bernoulli", "logistic-mixture"):
        with pytest.raises(ValueError, match=f"interpolate=True is not for head='{head}'; use ga"):
            vssm.ModelConfig(known="any", interpolate=True, head=head, **sizes)
    with pytest.raises(ValueError, match="interpolate is 1; it must be True or False"):
        vssm.ModelConfig(known="any", interpolate=1, **sizes)
    with pytest.raises(ValueError, match="season=2 needs interpolate=True"):
        vssm.ModelConfig(known="any", season=2, **sizes)
    with pytest.raises(ValueError, match="season=5 does not divide window=32; use a divisor"):
        vssm.ModelConfig(known="any", interpolate=True, season=5, **sizes)
    config = vssm.ModelConfig(known="any", interpolate=True, season=8, **sizes)
    assert vssm.ModelConfig.from_dict(config.to_dict()) == config
    new = "interpolate", "season"
    older = {name: value for name, value in config.to_dict().items() if name not in new}
    assert not vssm.ModelConfig.from_dict(older).interpolate


def test_how_tokens_are_marked_as_unknown_is_said():
    model = small_model("vssm", "categorical", known="any", window=4, levels=2, latents=4)
    for token, wrong in ((1, "nothing is unknown in x"), (-1, "x has tokens below 0")):
        message = f"^{wrong}; pass known=, False where a token is unknown$"
        with pytest.raises(ValueError, match=message):
            vssm.fill(model, torch.full((1, 4), token))


def test_tokens_are_filled():
    model = any_part(features=7, head="categorical")
    x = torch.randint(0, 7, (3, 10))
    known = x < 4
    made = vssm.fill(model, x, known, passes=4)
    assert made.dtype == x.dtype and torch.equal(made[known], x[known])


def test_given_columns_are_kept_and_needed():
    model = any_part(features=3, given=1)
    x = torch.full((2, 4, 3), torch.nan)
    with pytest.raises(ValueError, match="the last 1 features of x are given"):
        vssm.fill(model, x)
    x[..., 2] = 1.0
    made = vssm.fill(model, x)
    assert made.isfinite().all() and torch.equal(made[..., 2], x[..., 2])
    with pytest.raises(ValueError, match=r"use vssm\.fill"):
        vssm.generate(model)
    shape = r"must be \(batch, length, 3\), of which the last 1 features are given"
    for wrong in (x[0], x[..., :2]):
        with pytest.raises(ValueError, match=shape):
            vssm.fill(model, wrong)
    with pytest.raises(ValueError, match=r"x has shape \(0, 4, 3\), no sequences"):
        vssm.fill(model, x[:0])
    x[1, 2, 2] = torch.inf
    for call in (vssm.fill, vssm.log_likelihood, vssm.objective):
        with pytest.raises(
            ValueError, match="one of the given features of x contains NaN or infinite"
        ):
            call(model, x)


def test_more_passes_than_entries_change_nothing():
    for options in ({}, {"features": 5, "head": "categorical"}):
        model = any_part(**options)
        x, known = random_case(0, length=8)
        if options:
            x, known = x[..., 0].long(), known[..., 0]
        made = vssm.fill(model, x, known, passes=model.most_passes)
        assert torch.equal(vssm.fill(model, x, known, passes=10**9), made)
    made = [vssm.generate(model, length=6, passes=passes).x for passes in (4, 10**9)]
    assert torch.equal(*made)


def test_mistakes_are_named():
    model, x = any_part(), torch.rand(2, 8, 2)
    with pytest.raises(ValueError, match="nothing is unknown"):
        vssm.fill(model, x)
    with pytest.raises(ValueError, match=r"known has shape \(2, 7\)"):
        vssm.fill(model, x, torch.ones(2, 7, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"known has type torch\.float32"):
        vssm.fill(model, x, torch.ones(2, 8))
    with pytest.raises(ValueError, match="contains NaN"):
        vssm.fill(model, x.fill_(torch.nan), torch.ones(2, 8, dtype=torch.bool))
    prefix = vssm.build(vssm.ModelConfig(features=2, width=8, layers=1, latents=2, classes=2))
    with pytest.raises(ValueError, match=r"train a vssm with --model\.known any"):
        vssm.fill(prefix, x)
    with pytest.raises(ValueError, match="passes=2 does not fit this state"):
        state = vssm.generate(model, length=9, passes=3).state
        vssm.generate(model, length=2, state=state, passes=2)
