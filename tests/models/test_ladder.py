"""A vssm with levels keeps the promises of a vssm: bounds, chunks, resuming, prompts, ragged."""

import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import relative_error, sequences, small_config, small_model
from vssm import generate, load, log_likelihood, objective, observe, save
from vssm.config import ModelConfig, RunConfig, TrainConfig
from vssm.data import DataConfig
from vssm.models import Ladder
from vssm.nn import State
from vssm.sampling.ragged import generate_ragged
from vssm.serve.calls import make_steps
from vssm.serve.models import Served
from vssm.training.loop import train

SPANS = pytest.mark.parametrize("spans", [(), (5, 2)])


@pytest.fixture(params=[(), (4, 2, 1)], ids=["steps", "spans"])
def model(request):
    return small_model("vssm", levels=3, latents=6, spans=request.param).eval()


def exact(model, x, cut):
    """log p(x_{C+1:T} | x_{1:C}) by adding up all values of all latents, (B,)."""
    config, batch = model.config, len(x)
    task = model.task(x, torch.full((batch,), cut))
    own = config.latents // config.levels
    places = [
        (level, a, i)
        for level in range(config.levels)
        for a, live in enumerate(task.live[level][0].tolist())
        for i in range(own)
        if live
    ]
    totals = []
    for values in itertools.product(range(config.classes), repeat=len(places)):
        chosen = torch.zeros(config.levels, batch, task.e.shape[1], own, dtype=torch.int64)
        for (level, t, i), value in zip(places, values, strict=True):
            chosen[level, :, t, i] = value
        log_p_z = torch.zeros(batch)

        def draw(level, p_z, query, chosen=chosen):
            nonlocal log_p_z
            z = chosen[level][:, : task.live[level].shape[1]]
            log_p = p_z.log_probs.gather(-1, z.unsqueeze(-1)).squeeze(-1).sum(-1)
            log_p_z = log_p_z + (log_p * task.live[level]).sum(1)
            return z

        p_x, _ = model.descend(task.e, draw, cut=task.cut)
        totals.append(log_p_z + (p_x.log_prob(x) * task.new).sum(1))
    return torch.logsumexp(torch.stack(totals), 0)


@pytest.mark.parametrize(("cut", "spans"), [(0, ()), (1, (2, 1)), (0, (2, 1))])
@torch.no_grad()
def test_estimates_approach_the_exact_likelihood(cut, spans):
    model = small_model("vssm", levels=2, latents=2, classes=2, sigma=1.0, spans=spans)
    x = torch.rand(3, 2, 3)
    truth = exact(model, x, cut)
    few, many = (log_likelihood(model, x, num, prompt_length=cut) for num in (1, 4000))
    assert (many - truth).abs().max() < 0.08
    several = torch.stack(
        [log_likelihood(model, x, 1, prompt_length=cut, seed=s) for s in range(200)]
    )
    assert (several.mean(0) < truth + 0.08).all() and not torch.equal(few, many)


@pytest.mark.parametrize("spans", [(), (2, 1)])
def test_the_terms_are_bounds(spans):
    model = small_model("vssm", levels=2, latents=2, classes=2, sigma=1.0, spans=spans)
    x = torch.rand(2, 2, 3)
    truth, rest = exact(model, x, 0), exact(model, x, 1)
    draws = [objective(model, x) for _ in range(300)]
    elbo = torch.stack([terms.reconstruction - terms.kl for terms in draws]).mean(0)
    partial = torch.stack([terms.partial for terms in draws]).mean(
        0
    )  # two steps: the cut is always 1
    assert (elbo < truth).all() and (elbo > truth - 5).all()
    assert (partial < rest).all() and (partial > rest - 5).all()
    for terms in draws[:3]:
        assert relative_error(terms.loss, -(terms.reconstruction - terms.kl + terms.partial)) < 1e-6
        assert (terms.kl >= 0).all()


def test_all_weights_are_trained(model):
    objective(model, sequences(model, 4, 7)).loss.mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@SPANS
def test_shards_are_parts_of_the_whole(spans):
    model = small_model("vssm", levels=2, latents=4, spans=spans)
    x = sequences(model, 6, 5)

    def terms(part, shard):
        return objective(model, part, torch.Generator().manual_seed(3), shard)

    whole = terms(x, (0, 1))
    for index in range(2):
        own = terms(x[3 * index : 3 * index + 3], (index, 2))
        for a, b in zip(own, whole, strict=True):
            assert relative_error(a, b[3 * index : 3 * index + 3]) < 1e-5


@SPANS
@given(
    prompt=st.integers(0, 4),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    chunk=st.integers(1, 5),
    seed=st.integers(0, 9),
)
@torch.no_grad()
def test_chunks_and_resumed_parts_are_one_shot(spans, prompt, sizes, chunk, seed):
    model = small_model("vssm", levels=2, latents=4, spans=spans)
    x = sequences(model, 2, prompt) if prompt else None
    whole = generate(model, num=2, prompt=x, length=sum(sizes), seed=seed)
    cut = generate(model, num=2, prompt=x, length=sum(sizes), seed=seed, chunk=chunk)
    part = generate(model, num=2, prompt=x, length=sizes[0], seed=seed)
    xs, zs = [part.x], [part.z]
    for size in sizes[1:]:
        part = generate(model, length=size, state=part.state)
        xs.append(part.x)
        zs.append(part.z)
    for made, z, state in (
        (cut.x, cut.z, cut.state),
        (torch.cat(xs, 1), torch.cat(zs, 1), part.state),
    ):
        assert relative_error(made, whole.x) < 1e-5
        assert torch.equal(z, whole.z)
        assert state.position == whole.state.position == prompt + sum(sizes)


@torch.no_grad()
def test_observing_is_prompting(model):
    x = sequences(model, 3, 6)
    state = observe(model, x[:, 4:], observe(model, x[:, :4], seed=5))
    assert (
        relative_error(
            generate(model, length=4, state=state).x, generate(model, prompt=x, length=4, seed=5).x
        )
        < 1e-5
    )
    alone = generate(model, prompt=x[1:2], length=4, seed=5, rows=[1]).x
    assert relative_error(alone, generate(model, prompt=x, length=4, seed=5).x[1:2]) < 1e-5


@torch.no_grad()
def test_a_reconditioned_chunk_has_read_those_before(model):
    made = generate(model, num=2, length=6, chunk=3, recondition=True, seed=4)
    first = generate(model, num=2, length=3, seed=4)
    second = generate(model, length=3, state=observe(model, first.x, seed=4))
    assert relative_error(made.x, torch.cat([first.x, second.x], 1)) < 1e-5
    observe(model, first.x, made.state)  # it has read what it made
    with pytest.raises(
        ValueError, match="x cannot follow this state: it has run over empty tokens"
    ):
        observe(model, first.x, first.state)
    with pytest.raises(ValueError, match="recondition=True cannot start from this state"):
        generate(model, length=2, state=first.state, recondition=True)


@torch.no_grad()
def test_one_prompt_serves_all_rows_of_a_state(model):
    x = sequences(model, 4, 3)
    state, prompt = observe(model, x), sequences(model, 1, 2)
    shared = generate(model, prompt=prompt, length=3, state=state).x
    assert torch.equal(
        shared, generate(model, prompt=prompt.expand(4, -1, -1), length=3, state=state).x
    )


@torch.no_grad()
def test_temperature_sharpens(model):
    cold = [generate(model, num=8, length=5, seed=seed, temperature=1e-4).z for seed in (1, 2)]
    assert torch.equal(cold[0], cold[1])
    warm = [generate(model, num=8, length=5, seed=seed).z for seed in (1, 2)]
    assert not torch.equal(warm[0], warm[1])


def test_padding_changes_nothing(model):
    x, lengths = sequences(model, 3, 6), torch.tensor([6, 2, 4])
    padded = x.clone()
    for row, length in enumerate(lengths):
        padded[row, length:] = 9.0
    alone = [
        log_likelihood(model, x[row : row + 1, :length], 1) for row, length in enumerate(lengths)
    ]
    other = x.clone()
    other[lengths[:, None] <= torch.arange(6)] = -3.0
    given, again = (log_likelihood(model, values, 5, lengths=lengths) for values in (padded, other))
    assert relative_error(given, again) < 1e-6
    assert relative_error(log_likelihood(model, padded, 1, lengths=lengths)[0], alone[0][0]) < 1e-5
    a, b = (
        objective(model, values, torch.Generator().manual_seed(0), lengths=lengths)
        for values in (padded, other)
    )
    for one, two in zip(a, b, strict=True):
        assert relative_error(one, two) < 1e-5


@torch.no_grad()
def test_ragged_prompts_generate_as_alone(model):
    prompts = [torch.rand(4, 3), torch.rand(0, 3), torch.rand(2, 3)]
    together = generate_ragged(model, prompts, length=3, seed=2).x
    for row, prompt in enumerate(prompts):
        start = {"prompt": prompt[None]} if len(prompt) else {"num": 1}
        assert (
            relative_error(
                together[row], generate(model, length=3, seed=2, rows=[row], **start).x[0]
            )
            < 1e-5
        )


@pytest.mark.parametrize(
    "head", ["bernoulli", "categorical", "logistic-mixture", "gaussian-learned"]
)
@torch.no_grad()
def test_every_head(head):
    model = small_model("vssm", head, levels=2, latents=4)
    x = sequences(model, 2, 5)
    assert torch.isfinite(objective(model, x).loss).all()
    assert torch.isfinite(log_likelihood(model, x, 3, prompt_length=2)).all()
    made = generate(model, prompt=x[:, :2], length=3, observe="sample").x
    assert made.shape == x[:, 2:].shape


def test_it_is_saved_and_loaded(model, tmp_path):
    save(model, tmp_path / "ladder")
    again = load(tmp_path / "ladder")
    assert isinstance(again, Ladder)
    assert torch.equal(generate(again, num=2, length=4).x, generate(model, num=2, length=4).x)


def test_the_trainer_takes_it(tmp_path):
    config = RunConfig(
        data=DataConfig(name="digits"),
        model=small_config("vssm", levels=2, latents=4),
        train=TrainConfig(
            max_steps=12,
            batch=32,
            log_every=4,
            samples=0,
            num_valid=32,
            device="cpu",
            kl_warmup=0.5,
        ),
    )
    train(config, tmp_path / "run")
    assert isinstance(load(tmp_path / "run"), Ladder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "ssm", "levels": 2}, "levels=2 is not for kind='ssm'; use kind='vssm'"),
        ({"levels": 5}, "latents=32 is not divisible by levels=5; use a multiple of 5"),
        ({"levels": 0}, "levels is 0; it must be a whole number >= 1"),
    ],
    ids=str,
)
def test_bad_configs_are_named(options, message):
    with pytest.raises(ValueError) as caught:
        ModelConfig(features=3, **options)
    assert message in str(caught.value)


def test_passes_are_for_models_without_levels(model):
    with pytest.raises(
        ValueError, match=r"passes=2 is for a vssm or tvae without levels; use passes=1"
    ):
        generate(model, num=1, length=4, passes=2)


def test_a_prompt_that_is_everything_leaves_nothing_to_explain(model):
    x = sequences(model, 2, 4)
    assert torch.equal(log_likelihood(model, x, 3, prompt_length=4), torch.zeros(2))


def test_what_is_known_is_read_once(model):
    """The state after a prompt does not depend on noise, and does not grow."""
    x = sequences(model, 2, 5)
    a, b = (observe(model, x, seed=seed) for seed in (1, 2))
    assert all(
        torch.equal(p, q)
        for p, q in zip(a.child("trunk").leaves(), b.child("trunk").leaves(), strict=True)
    )
    longer = observe(model, x, a)
    sizes = [sum(leaf.numel() for leaf in state.child("trunk").leaves()) for state in (a, longer)]
    assert sizes[0] == sizes[1] and math.isfinite(sizes[0])


@torch.no_grad()
def test_a_latent_speaks_for_its_span():
    model = small_model("vssm", levels=2, latents=4, spans=(3, 1)).eval()
    made = generate(model, num=16, length=7, seed=1)
    assert made.z is not None
    held, own = made.z[..., :2], made.z[..., 2:]
    assert torch.equal(held[:, 0], held[:, 2]) and torch.equal(held[:, 3], held[:, 5])
    assert not torch.equal(held[:, 2], held[:, 3]) and not torch.equal(own[:, 0], own[:, 1])
    left = made.state.child("blind")["held0"]
    assert left.shape == (16, 2, 2) and torch.equal(left[:, 0], held[:, 6])
    after = generate(model, length=2, state=made.state)
    assert after.z is not None and torch.equal(after.z[..., :2], left)
    assert "held0" not in after.state.child("blind").children
    # What follows a prompt begins with latents of its own, wherever the prompt ends.
    prompted = generate(model, prompt=sequences(model, 16, 2), length=3, seed=1)
    assert prompted.z is not None and torch.equal(prompted.z[:, 0, :2], prompted.z[:, 2, :2])


@torch.no_grad()
def test_states_that_began_elsewhere_do_not_mix():
    model = small_model("vssm", levels=2, latents=4, spans=(3, 1)).eval()
    begun = [
        generate(model, length=7).state,
        generate(model, prompt=sequences(model, 1, 2), length=5).state,
        generate(model, length=7, seed=3).state,
    ]
    assert [state.position for state in begun] == [7, 7, 7]
    with pytest.raises(ValueError, match="states have 'held0' of shapes"):
        State.cat(begun[:2])
    served = Served("model", model, None)
    calls = [make_steps(served, s["seed"], s["row"], 4, state=s) for s in begun]
    keys = [next(each).key for each in calls]
    assert keys[0] == keys[2] != keys[1]  # what a server computes together
    both = generate(model, length=4, state=State.cat(begun[::2])).x
    for row, state in zip(both, begun[::2], strict=True):
        assert relative_error(row, generate(model, length=4, state=state).x[0]) < 1e-5


@pytest.mark.parametrize("spans", [(2,), (2, 0), (2, 1.5), (2, 1, 1)])
def test_bad_spans(spans):
    with pytest.raises(
        ValueError, match=r"spans is .* with levels=2; it must have one whole number"
    ):
        small_config("vssm", levels=2, latents=4, spans=spans)
    with pytest.raises(ValueError, match=r"spans is .* with levels=1"):
        small_config("vssm", spans=(2,))


def test_spans_come_back_from_json():
    config = small_config("vssm", levels=2, latents=4, spans=(3, 1))
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and hash(again) == hash(config)


def test_what_explains_a_step_has_read_all_that_follows():
    """One layer reads backwards only; a second one would read forwards what that found."""
    model = small_model("vssm", levels=2, latents=4, layers=1)
    x = sequences(model, 1, 5).requires_grad_()
    evidence = model.task(x, torch.zeros(1, dtype=torch.int64)).evidence[0][0]
    for t in range(5):
        (reach,) = torch.autograd.grad(evidence[t].sum(), x, retain_graph=True)
        assert (reach[0].abs().sum(1) > 0).tolist() == [step >= t for step in range(5)]


@SPANS
@torch.no_grad()
def test_samples_of_the_head_do_not_depend_on_chunks(spans):
    model = small_model("vssm", levels=2, latents=4, spans=spans)
    options = {"observe": "sample", "temperature": 0.7}
    whole = generate(model, num=2, length=6, seed=1, **options).x
    assert (
        relative_error(generate(model, num=2, length=6, seed=1, chunk=4, **options).x, whole) < 1e-5
    )
    first = generate(model, num=2, length=2, seed=1, **options)
    rest = generate(model, length=4, state=first.state, **options).x
    assert relative_error(torch.cat([first.x, rest], 1), whole) < 1e-5


def test_latents_begin_once_for_each_span():
    model = small_model("vssm", levels=3, latents=6, spans=(4, 2, 1))
    begins = model.begins(9)
    assert begins.shape == (9, 6) and begins.sum() == 2 * (3 + 5 + 9)
