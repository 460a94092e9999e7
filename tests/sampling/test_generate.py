"""One seed gives one sample, however it is made."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import conftest
from tests.conftest import KINDS, relative_error, same_states, sequences, small_model
from vssm import State, generate, load, log_likelihood, noise, objective, observe, save
from vssm.sampling.ahead import posterior_ahead

PARALLEL = ("tvae", "vssm")
AUTOREGRESSIVE = ("transformer", "ssm", "rnn")
TOLERANCE = 1e-4


def same(given, expected):
    conftest.same(given, expected, TOLERANCE)


@pytest.mark.parametrize("sample", ["mean", "sample"])
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_resumed_anywhere_equals_one_go(kind, sample, data):
    model = small_model(kind)
    length, prompted = 9, data.draw(st.booleans())
    cut, seed = data.draw(st.integers(0, length)), data.draw(st.integers(-5, 2**40))
    prompt = sequences(model, 2, 3) if prompted else None
    whole = generate(model, num=2, length=length, prompt=prompt, observe=sample, seed=seed)
    first = generate(model, num=2, length=cut, prompt=prompt, observe=sample, seed=seed)
    rest = generate(model, length=length - cut, state=first.state, observe=sample)
    same(torch.cat([first.x, rest.x], 1), whole.x)
    assert rest.state.position == whole.state.position == length + (3 if prompted else 0)
    if whole.z is not None:
        assert torch.equal(torch.cat([first.z, rest.z], 1), whole.z)


@pytest.mark.parametrize("kind", PARALLEL)
@given(chunk=st.integers(1, 12), prompted=st.booleans(), seed=st.integers(0, 99))
def test_any_chunk_equals_one_shot(kind, chunk, prompted, seed):
    model = small_model(kind)
    prompt = sequences(model, 2, 4) if prompted else None
    whole = generate(model, num=2, length=9, prompt=prompt, seed=seed)
    chunked = generate(model, num=2, length=9, prompt=prompt, seed=seed, chunk=chunk)
    same(chunked.x, whole.x)
    assert torch.equal(chunked.z, whole.z)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_split_equals_whole_batch(kind):
    model = small_model(kind)
    prompt = sequences(model, 6, 3)
    whole = generate(model, length=7, prompt=prompt, seed=3, observe="sample").x
    halves = [
        generate(model, length=7, prompt=prompt[rows], seed=3, rows=list(rows), observe="sample").x
        for rows in (range(4), range(4, 6))
    ]
    same(torch.cat(halves), whole)
    seeds = torch.tensor([3, 8, 3, 8, 3, 8])
    mixed = generate(model, length=7, prompt=prompt, seed=seeds, observe="sample").x
    same(mixed[::2], whole[::2])
    assert relative_error(mixed[1::2], whole[1::2]) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_equals_observe_then_generate(kind):
    model = small_model(kind)
    x = sequences(model, 2, 6)
    state = observe(model, x[:, 2:], observe(model, x[:, :2], seed=4))
    for temperature in (1.0, 0.5):
        prompted = generate(model, length=5, prompt=x, seed=4, temperature=temperature)
        same(generate(model, length=5, state=state, temperature=temperature).x, prompted.x)
    same(
        generate(model, length=5, prompt=x[:, 2:], state=observe(model, x[:, :2], seed=4)).x,
        generate(model, length=5, prompt=x, seed=4).x,
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler looks at it
@pytest.mark.filterwarnings("ignore:torch.compile has no effect:UserWarning")
@pytest.mark.parametrize(
    "options", [{"kind": kind} for kind in KINDS] + [{"kind": "vssm", "levels": 3}]
)
def test_a_wrapped_model_is_used_as_the_one_inside(options, tmp_path):
    model = small_model(**options)
    wrapped, x = torch.compile(model, backend="eager"), sequences(model, 3, 6)
    assert not isinstance(wrapped, type(model))
    states = [observe(each, x[:, 4:], observe(each, x[:, :4])) for each in (wrapped, model)]
    same_states(*states)
    assert states[0].owner == states[1].owner
    same(*(generate(each, length=3, state=states[0]).x for each in (wrapped, model)))
    same(*(log_likelihood(each, x, num_samples=2) for each in (wrapped, model)))
    same(*(objective(each, x, torch.Generator().manual_seed(0)).loss for each in (wrapped, model)))
    save(wrapped, tmp_path)
    same(*(generate(each, num=2, length=3).x for each in (load(tmp_path), model)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [{"num": 10**9, "length": 10**6}, {"num": 1, "length": 10**12}])
def test_what_can_not_fit_is_refused_at_once(kind, size):
    with pytest.raises(ValueError, match=r"^num=1\d* and length=1\d* would take [\d,]+ GB, but"):
        generate(small_model(kind), **size)


@pytest.mark.parametrize("kind", KINDS)
def test_one_prompt_serves_many_rows(kind):
    model = small_model(kind)
    prompt = sequences(model, 1, 4)
    many = generate(model, num=3, length=5, prompt=prompt, observe="sample")
    expanded = generate(model, length=5, prompt=prompt.expand(3, -1, -1), observe="sample")
    same(many.x, expanded.x)
    assert relative_error(many.x[0], many.x[1]) > 1e-3, "the continuations differ"
    same(
        generate(model, length=4, state=many.state).x,
        generate(model, length=4, state=expanded.state).x,
    )
    read = generate(model, length=5, state=observe(model, prompt, num=3), observe="sample")
    same(read.x, many.x)
    forked = generate(model, length=5, state=observe(model, prompt).repeat(3), observe="sample")
    assert relative_error(forked.x[0], forked.x[1]) > 1e-3


def z_scores_of_means(make, seeds=12, samples=500):
    """Returns the spread of means of samples over seeds, in units of their Monte Carlo error."""
    x = torch.stack([make(seed, samples) for seed in range(seeds)])  # (seeds, samples, D)
    return x.mean(1).std(0) / (x.std(1).mean(0) / samples**0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_after_data_that_was_read_follow_the_law_of_the_model(kind):
    model = small_model(kind, sigma=0.001)
    x = sequences(model, 1, 4)
    ways = {"length": 1, "observe": "sample"}
    prompted = z_scores_of_means(
        lambda s, n: generate(model, num=n, prompt=x, seed=s, **ways).x[:, 0]
    )
    observed = z_scores_of_means(
        lambda s, n: generate(model, state=observe(model, x, seed=s, num=n), **ways).x[:, 0]
    )
    shared = z_scores_of_means(
        lambda s, n: generate(model, state=observe(model, x, seed=s).repeat(n), **ways).x[:, 0]
    )
    assert prompted.max() < 2.2 and observed.max() < 2.2
    if kind in ("vssm", "vrnn"):  # in this tvae latents of the past hardly matter
        assert shared.max() > 3, "copies of one state share the latents of the past"
    if kind in (*PARALLEL, "vrnn"):
        with pytest.raises(
            ValueError, match="num=9 sequences would share the latents behind this state"
        ):
            generate(model, num=9, state=observe(model, x), length=1)
    else:
        assert shared.max() < 2.2
        assert generate(model, num=9, state=observe(model, x), length=1).x.shape == (9, 1, 3)


def test_a_sample_can_be_continued_in_many_ways():
    model = small_model("vssm")
    out = generate(model, num=1, length=3)
    assert len(generate(model, num=9, length=3, state=out.state).x.unique(dim=0)) == 9


@pytest.mark.parametrize("kind", KINDS)
def test_states_can_be_rebatched_saved_and_continued_twice(kind, tmp_path):
    model = small_model(kind)
    out = generate(model, num=4, length=5, seed=2)
    more = generate(model, length=3, state=out.state).x
    picked = generate(model, length=3, state=out.state.select([3, 1])).x
    same(picked, more[[3, 1]])
    out.state.save(tmp_path / "state")
    same(generate(model, length=3, state=State.load(tmp_path / "state")).x, more)
    other = generate(model, length=3, state=out.state, seed=9, observe="sample").x
    assert relative_error(other, more) > 1e-3, "another seed, another continuation"
    same(generate(model, length=3, state=out.state).x, more)


OWNERS = [
    *({"kind": kind} for kind in KINDS),
    {"kind": "vssm", "levels": 3},
    {"kind": "transformer", "head": "categorical"},
]


@pytest.mark.parametrize("options", OWNERS, ids=str)
@pytest.mark.parametrize("steps", [1, 6])
def test_a_state_is_its_own_whatever_becomes_of_what_was_given_and_made(options, steps):
    model = small_model(**options)
    x = sequences(model, 2, steps)
    given = x.clone(), torch.tensor([3, 4]), torch.tensor([5, 6])

    def check(state, *others):
        before = state.map(torch.clone)
        expected = generate(model, length=4, state=state).x
        for tensor in (*given, *others):
            tensor.copy_((tensor + 1) % 5)
        same_states(before, state)
        assert torch.equal(generate(model, length=4, state=state).x, expected)
        given[0].copy_(x)

    check(observe(model, given[0], seed=given[1], rows=given[2]))
    check(observe(model, given[0], observe(model, given[0]), seed=given[1], rows=given[2]))
    for length in (0, 1, 3):
        for cache in (True, False) if options["kind"] in AUTOREGRESSIVE else (True,):
            dials = {"length": length, "seed": given[1], "rows": given[2], "cache": cache}
            made = generate(model, prompt=given[0], **dials)
            check(made.state, *(tensor for tensor in made[:2] if tensor is not None))


@pytest.mark.parametrize("kind", AUTOREGRESSIVE)
def test_a_state_does_not_keep_what_was_read(kind):
    x = torch.rand(2, 500, 3)
    assert observe(small_model(kind), x)["last"].untyped_storage().nbytes() == 2 * 3 * 4
    x.requires_grad_()
    small_model(kind)(x)[1]["last"].sum().backward()
    assert torch.equal(x.grad[:, -1], torch.ones(2, 3))
    assert not x.grad[:, :-1].any()


def damaged(state, path, change):
    """The state with one entry changed, or without it where the change gives None."""
    first, _, rest = path.partition("/")
    children = dict(state.children)
    children[first] = (
        damaged(state.child(first), rest, change) if rest else change(children.get(first))
    )
    if children[first] is None:
        del children[first]
    return State(children, state.position, state.owner)


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("seed", lambda _: None, "state has no tensor 'seed'; use a state from generate"),
        ("row", lambda _: None, "state has no tensor 'row'; "),
        ("partial/1/conv", lambda _: None, "state has no tensor 'conv'; "),
        ("decoder/0", lambda _: None, "state has no nested state '0'; "),
        ("decoder/0", lambda _: torch.ones(2), "state has no nested state '0'; "),
        ("decoder/0/ssm", lambda t: t[:, 1:], "h0 has shape (2, 31, 4); "),
        (
            "decoder/0/ssm",
            lambda t: t[:1],
            "state has 'decoder/0/ssm' of shape (1, 32, 4); it must have 2 rows",
        ),
        ("seed", lambda t: t[0], "state has 'seed' of shape (); "),
    ],
)
def test_what_is_wrong_in_a_state_is_named(path, change, message):
    model = small_model("vssm")
    state = damaged(observe(model, sequences(model, 2, 3)), path, change)
    for use in (
        lambda: generate(model, length=2, state=state),
        lambda: observe(model, PROMPT, state),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            use()


def test_states_without_tensors_or_a_position_are_named():
    model = small_model("vssm")
    owner = observe(model, PROMPT).owner
    with pytest.raises(ValueError, match=r"^state has no tensor 'row'; "):
        generate(model, length=2, state=State({}, 3, owner))
    with pytest.raises(ValueError, match=r"^state.position is '3'; it must be a whole number >= 0"):
        generate(model, length=2, state=State({}, "3", owner))


@pytest.mark.parametrize("kind", PARALLEL)
def test_a_state_can_be_forked_again_and_again(kind):
    model = small_model(kind)
    state = observe(model, sequences(model, 1, 3))
    for _ in range(10):
        made = generate(model, length=1, state=state.repeat(20), recondition=True, observe="sample")
        assert len(made.x.unique(dim=0)) == 20
        state = made.state.select([19])


@pytest.mark.parametrize("kind", PARALLEL)
def test_generation_from_nothing_runs_the_partial_posterior_on_one_row(kind):
    model, seen = small_model(kind), []
    model.partial.blocks[0].register_forward_hook(
        lambda _, given, made: seen.append(given[0].shape)
    )
    generate(model, num=5, length=7, seed=1)
    generate(model, num=9, length=7, seed=2, chunk=3)
    assert seen == [(1, 7, 16), (1, 7, 16)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_the_weights_is_seen(kind):
    """Also one that PyTorch does not count: of `data`, or by a fused optimiser."""
    model, made = small_model(kind), []
    for change in (None, "data", "optimiser"):
        for weight in model.parameters() if change else ():
            weight.grad = torch.randn_like(weight)
            if change == "data":
                weight.data.mul_(1.5)
        if change == "optimiser":
            torch.optim.AdamW(model.parameters(), lr=0.3, fused=True).step()
        fresh = small_model(kind)
        fresh.load_state_dict(model.state_dict())
        made.append(generate(model, num=4, length=5).x)
        assert torch.equal(made[-1], generate(fresh, num=4, length=5).x)
    assert relative_error(made[0], made[1]) > 1e-3 and relative_error(made[1], made[2]) > 1e-3


class Adapter(torch.nn.Module):
    """Takes the place of a layer, as adapters do, and may be switched off."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.enabled = layer, True

    def forward(self, x):
        return self.layer(x) * (3 if self.enabled else 1)


@pytest.mark.parametrize("part", ["partial", "decoder", "stack"])
def test_adapters_and_hooks_are_called_in_every_call(part):
    model = small_model("ssm" if part == "stack" else "vssm")
    options = {"num": 2, "length": 6, "seed": 4, "temperature": 0.5, "observe": "sample"}
    stack, seen = getattr(model, part), []
    plain = generate(model, **options).x
    stack.out = Adapter(stack.out)
    loud = generate(model, **options).x
    assert relative_error(loud, plain) > 1e-3
    stack.out.enabled = False
    assert torch.equal(generate(model, **options).x, plain)
    stack.out.register_forward_hook(lambda _, given, made: seen.append(made) or 3 * made)
    for calls in (1, 2):
        assert relative_error(generate(model, **options).x, loud) < 1e-6
        assert len(seen) == calls * (6 if part == "stack" else 1)


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("kind", PARALLEL)
def test_a_state_that_is_written_to_changes_no_other(kind, num):
    model, options = small_model(kind), {"num": num, "length": 4, "seed": 1}
    made = generate(model, **options)
    before = generate(model, length=4, state=made.state).x
    for leaf in generate(model, **options).state.leaves():
        leaf.zero_()
    same(generate(model, length=4, state=made.state).x, before)
    same(generate(model, length=4, state=generate(model, **options).state).x, before)


@pytest.mark.parametrize("kind", PARALLEL)
def test_reconditioned_chunks_read_what_was_generated(kind):
    model = small_model(kind)
    prompt = sequences(model, 2, 3)
    whole = generate(model, length=8, prompt=prompt, seed=1)
    same(generate(model, length=8, prompt=prompt, seed=1, recondition=True).x, whole.x)
    dial = generate(model, length=8, prompt=prompt, seed=1, chunk=4, recondition=True)
    same(dial.x[:, :4], whole.x[:, :4])
    # By hand: the second chunk is a prompted generation after prompt and first chunk.
    q_z, _ = model.partial_posterior(torch.cat([prompt, dial.x[:, :4]], 1), empty=4)
    blind, _ = model.partial_posterior(prompt, empty=8)
    assert relative_error(q_z.logits[:, 7:], blind.logits[:, 7:]) > 1e-3
    from vssm import noise

    u = noise.uniform(torch.tensor([1, 1]), torch.arange(2), 7, 4, 3)
    assert torch.equal(dial.z[:, 4:], q_z.sample(torch.cat([torch.rand(2, 7, 3), u], 1))[:, 7:])
    # The state has read data only: it can be resumed and observed.
    first = generate(model, length=4, prompt=prompt, seed=1, chunk=4, recondition=True)
    same(generate(model, length=4, state=first.state, recondition=True).x, dial.x[:, 4:])
    assert observe(model, prompt, first.state).position == 10


def reading_model(kind, **options):
    """A small model whose next latents depend on what was read, attention too."""
    model = small_model(kind, **options)
    if kind == "tvae":
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)
    return model


def same_samples(a, b, steps=None):
    assert torch.equal(a.z[:, :steps], b.z[:, :steps])
    assert relative_error(a.x[:, :steps], b.x[:, :steps]) < 1e-5


def starts(model):
    """From nothing, a prompt, a state, both, and one prompt or state for all rows."""
    x = sequences(model, 3, 4)
    return [
        {"num": 3, "seed": 5},
        {"prompt": x, "seed": 5, "observe": "sample"},
        {"state": observe(model, x, seed=5), "temperature": 0.7},
        {"state": observe(model, x, seed=5), "prompt": x, "temperature": 1.5, "observe": "sample"},
        {"num": 3, "prompt": x[:1], "seed": 5},
        {"state": observe(model, x[:1], seed=5, num=3)},
    ]


@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("kind", PARALLEL)
def test_passes_settle_a_step_each_on_the_way_to_step_by_step(kind, start):
    model = reading_model(kind)
    options = {"length": 7, **starts(model)[start]}
    stepwise = generate(model, chunk=1, recondition=True, **options)
    one_shot = generate(model, **options)
    assert not torch.equal(one_shot.z, stepwise.z), "else there is nothing to refine"
    for passes in (2, 3, 6):
        same_samples(generate(model, passes=passes, **options), stepwise, steps=passes)
    for passes in (7, 30):
        refined = generate(model, passes=passes, **options)
        same_samples(refined, stepwise)
        same_states(refined.state, stepwise.state)


@pytest.mark.parametrize("kind", PARALLEL)
def test_one_pass_is_one_shot(kind):
    model = small_model(kind)
    for start in starts(model):
        plain, one = (
            generate(model, length=6, **start),
            generate(model, length=6, passes=1, **start),
        )
        assert torch.equal(one.x, plain.x) and torch.equal(one.z, plain.z)
        assert "blind" in one.state.children
        assert all(map(torch.equal, one.state.leaves(), plain.state.leaves()))


@pytest.mark.parametrize("kind", PARALLEL)
def test_passes_inside_chunks(kind):
    model = reading_model(kind)
    options = {"prompt": sequences(model, 3, 4), "seed": 2}
    stepwise = generate(model, length=8, chunk=1, recondition=True, **options)
    for chunk in (1, 3, 8):  # the last chunk is a short one
        refined = generate(model, length=8, chunk=chunk, passes=chunk, recondition=True, **options)
        same_samples(refined, stepwise)
        same_states(refined.state, stepwise.state)
    # With two passes the second chunk reads the first, as a call that resumes does.
    both = generate(model, length=8, chunk=4, passes=2, **options)
    first = generate(model, length=4, passes=2, **options)
    rest = generate(model, length=4, passes=2, state=first.state)
    same_samples(first, both, steps=4)
    assert torch.equal(rest.z, both.z[:, 4:])
    same_states(rest.state, both.state)
    same_samples(generate(model, length=8, chunk=4, passes=2, recondition=True, **options), both)
    assert observe(model, options["prompt"], both.state).position == 16


@pytest.mark.parametrize("kind", PARALLEL)
@pytest.mark.parametrize(
    "head", ["gaussian-learned", "bernoulli", "categorical", "logistic-mixture"]
)
def test_passes_suit_every_head(kind, head):
    model = reading_model(kind, head=head)
    options = {"num": 2, "length": 5, "observe": "sample", "seed": 1}
    same_samples(
        generate(model, passes=5, **options), generate(model, chunk=1, recondition=True, **options)
    )


def test_passes_in_double_and_over_many_steps():
    model = small_model("vssm").double()  # without a kernel
    options = {"num": 2, "length": 9, "seed": 1}
    stepwise = generate(model, chunk=1, recondition=True, **options)
    refined = generate(model, passes=9, **options)
    assert relative_error(refined.x, stepwise.x) < 1e-12
    assert torch.equal(refined.z, stepwise.z)
    model = small_model("vssm")
    x = sequences(model, 2, 70)  # 139 steps of two streams, more than a kernel takes at a time
    ahead = posterior_ahead(model, x).logits
    for t in (0, 1, 31, 32, 69):
        with torch.no_grad():
            logits = model.partial_posterior(x[:, :t] if t else None, empty=1)[0].logits
        assert relative_error(ahead[:, t], logits[:, -1].expand(2, -1, -1)) < 1e-5


@pytest.mark.parametrize("kind", AUTOREGRESSIVE)
def test_recomputation_equals_the_cache(kind):
    """The paper's Transformer algorithm and the key-value cache give one sample."""
    model = small_model(kind)
    for prompt in (None, sequences(model, 2, 3)):
        cached = generate(model, num=2, length=6, prompt=prompt, observe="sample")
        recomputed = generate(model, num=2, length=6, prompt=prompt, observe="sample", cache=False)
        same(recomputed.x, cached.x)
        same(
            generate(model, length=2, state=recomputed.state).x,
            generate(model, length=2, state=cached.state).x,
        )


@pytest.mark.parametrize("kind", AUTOREGRESSIVE)
def test_autoregressive_samples_are_the_mean_plus_noise_fed_back(kind):
    model = small_model(kind)
    means = generate(model, num=2, length=6, seed=5).x
    samples = generate(model, num=2, length=6, seed=5, observe="sample").x
    with torch.no_grad():
        same(model(samples)[0].mean, means)
    assert 0.5 < float((samples - means).std()) / model.config.sigma < 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_temperature_sharpens(kind):
    model = small_model(kind)
    cold = generate(model, num=64, length=3, temperature=1e-4, observe="sample").x
    warm = generate(model, num=64, length=3, temperature=1.0, observe="sample").x
    assert cold.std(0).mean() < 0.1 * warm.std(0).mean()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_generate(kind):
    model = small_model(kind)
    out = generate(model, num=2, length=0, seed=3)
    assert out.x.shape == (2, 0, 3)
    same(generate(model, length=4, state=out.state).x, generate(model, num=2, length=4, seed=3).x)
    prompt = sequences(model, 2, 3)
    out = generate(model, length=0, prompt=prompt)
    same(generate(model, length=4, state=out.state).x, generate(model, length=4, prompt=prompt).x)


def test_text_prompt_shapes():
    model = small_model("vssm", "categorical")
    out = generate(model, length=6, prompt=torch.tensor([[1, 2, 3]]), observe="sample")
    assert out.x.shape == (1, 6)
    assert out.x.dtype == torch.int64


@pytest.mark.parametrize("kind", AUTOREGRESSIVE)
def test_a_model_of_tokens_returns_the_tokens_that_it_was_conditioned_on(kind):
    model = small_model(kind, "categorical")
    out = generate(model, num=16, length=12, seed=3)
    assert torch.equal(out.state["last"], out.x[:, -1:])
    same_states(out.state, observe(model, out.x, seed=3))


PROMPT = torch.rand(2, 3, 3)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("vssm", {"length": -1}, "length is -1; it must be a whole number >= 0"),
        ("vssm", {"length": 2.5}, "length is 2.5; it must be"),
        ("vssm", {"num": 0}, "num is 0; it must be"),
        ("vssm", {"seed": 2**64}, "seed is 18446744073709551616"),
        ("vssm", {"prompt": [[0.0]]}, "prompt has type list; it must be a torch tensor"),
        ("vssm", {"chunk": 0}, "chunk is 0; it must be a whole number >= 1"),
        ("vssm", {"temperature": 0.0}, "temperature is 0.0; it must be a number"),
        ("vssm", {"temperature": float("nan")}, "temperature is nan"),
        ("vssm", {"observe": "draw"}, "observe='draw' is unknown; choose from 'mean', 'sample'"),
        ("vssm", {"cache": False}, "cache=False is for autoregressive models, not kind='vssm'"),
        ("ssm", {"chunk": 2}, "chunk=2 is for models that generate in parallel, not kind='ssm'"),
        ("vssm", {"passes": 0}, "passes is 0; it must be a whole number >= 1"),
        ("tvae", {"passes": 1.5}, "passes is 1.5; it must be a whole number >= 1"),
        (
            "ssm",
            {"passes": 2},
            "passes=2 is for models that generate in parallel, not kind='ssm'; use a vssm",
        ),
        (
            "vrnn",
            {"passes": 3},
            "passes=3 is for models that generate in parallel, not kind='vrnn'",
        ),
        ("vrnn", {"recondition": True}, "recondition=True is for models that generate in parallel"),
        (
            "vssm",
            {"prompt": PROMPT[0]},
            r"prompt has shape \(3, 3\); it must be \(batch, length, 3\)",
        ),
        ("vssm", {"prompt": PROMPT[..., :2]}, r"prompt has shape \(2, 3, 2\)"),
        ("vssm", {"prompt": PROMPT / 0}, "prompt contains NaN or infinite values at row 0, step 0"),
        ("vssm", {"prompt": PROMPT, "num": 3}, "prompt has 2 rows; it must have 1 or 3"),
        ("vssm", {"num": 2, "seed": torch.arange(3)}, r"seed has shape \(3,\); it must be \(2,\)"),
        ("vssm", {"num": 2, "rows": [1]}, r"rows has shape \(1,\); it must be \(2,\)"),
        ("vssm", {"state": "h"}, "state has type str; use one from generate"),
        ("vssm", {"prompt": PROMPT.to("meta")}, "prompt is on meta; move it to cpu"),
    ],
)
def test_bad_input_is_named(kind, options, message):
    with pytest.raises(ValueError, match=message):
        generate(small_model(kind), **options)


def test_bad_states_are_named():
    model = small_model("vssm")
    out = generate(model, num=2, length=4)
    x = torch.rand(2, 3, 3)
    for other in (small_model("tvae"), small_model("vssm", width=32)):
        with pytest.raises(
            ValueError, match=r"state belongs to another model .*kind=vssm.*use a state of"
        ):
            generate(other, length=2, state=out.state)
    with pytest.raises(ValueError, match="prompt cannot follow this state"):
        generate(model, length=2, prompt=x, state=out.state)
    with pytest.raises(
        ValueError, match="x cannot follow this state: it has run over empty tokens"
    ):
        observe(model, x, out.state)
    with pytest.raises(ValueError, match="recondition=True cannot start from this state"):
        generate(model, length=2, state=out.state, recondition=True)
    with pytest.raises(
        ValueError, match="passes=2 cannot start from this state: it has run over empty"
    ):
        generate(model, length=2, state=out.state, passes=2)
    with pytest.raises(ValueError, match="state has 2 rows; it must have 1 or 3"):
        generate(model, num=3, length=2, state=out.state)
    with pytest.raises(ValueError, match="x has 3 rows; it must have 2, or one row for all"):
        observe(model, torch.rand(3, 3, 3), observe(model, x))
    with pytest.raises(ValueError, match="num=3 does not fit the 2 rows of the state"):
        observe(model, x, observe(model, x), num=3)
    with pytest.raises(ValueError, match="x has 2 rows; it must have 3, or one row for all"):
        observe(model, x, num=3)
    with pytest.raises(ValueError, match=r"state is on meta; use state.to\('cpu'\)"):
        generate(model, length=2, state=out.state.map(lambda tensor: tensor.to("meta")))
    with pytest.raises(ValueError, match="no steps; it must have one step or more"):
        observe(model, x[:, :0])
    with pytest.raises(ValueError, match="cannot use a state"):
        ssm = small_model("ssm")
        generate(ssm, length=2, state=observe(ssm, x), cache=False)


def test_noise_of_a_long_loop_is_that_of_its_parts():
    """A loop draws the noise of 1,024 steps at a time."""
    model = small_model("rnn", width=8, layers=1)
    whole = generate(model, num=2, length=1030, seed=3, observe="sample")
    first = generate(model, num=2, length=1020, seed=3, observe="sample")
    rest = generate(model, length=10, state=first.state, observe="sample")
    same(torch.cat([first.x, rest.x], 1), whole.x)


@pytest.mark.parametrize("kind", AUTOREGRESSIVE)
def test_recomputation_has_the_options_of_the_cache(kind):
    model = small_model(kind)
    for options in ({"temperature": 0.3}, {"temperature": 3.0, "observe": "sample"}):
        cached, recomputed = (
            generate(model, num=2, length=4, cache=cache, **options).x for cache in (True, False)
        )
        same(recomputed, cached)


@pytest.mark.parametrize(
    "options", [*({"kind": kind} for kind in KINDS), {"kind": "vssm", "levels": 3}], ids=str
)
def test_temperature_multiplies_the_scale_of_an_observation(options):
    model = small_model(**options)

    def noise(temperature):
        mean, sample = (
            generate(model, num=4, length=1, temperature=temperature, observe=what).x
            for what in ("mean", "sample")
        )
        return sample - mean

    same(noise(0.25), 0.25 * noise(1.0))


@pytest.mark.parametrize("kind", ["vssm", "tvae"])
def test_new_steps_hold_on_to_nothing_of_a_prompt(kind):
    made = generate(small_model(kind), prompt=torch.rand(2, 50, 3), length=3)
    assert made.x.untyped_storage().nbytes() == made.x.nbytes
    assert made.z.untyped_storage().nbytes() == made.z.nbytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_steps_have_the_type_of_steps(kind, dtype):
    model = small_model(kind).to(dtype)
    assert generate(model, length=0).x.dtype == generate(model, length=1).x.dtype


def test_a_default_device_is_not_that_of_the_noise():
    seed, row = torch.zeros(2, dtype=torch.int64), torch.arange(2)
    expected = noise.uniform(seed, row, 0, 3, 4)
    with torch.device("meta"):  # no kernel takes a tensor of it beside one of the CPU
        assert torch.equal(noise.uniform(seed, row, 0, 3, 4), expected)


def test_chunks_from_nothing_share_one_empty_pass(monkeypatch):
    model, passes = small_model("vssm", width=8, layers=1), []
    run = model.partial_posterior

    def counted(x=None, empty=0, state=None):
        passes.append(empty)
        return run(x, empty=empty, state=state)

    monkeypatch.setattr(model, "partial_posterior", counted)
    whole, chunks = (generate(model, num=3, length=11, chunk=chunk, seed=5) for chunk in (None, 4))
    assert passes == [11, 11]
    same(chunks.x, whole.x)
    same(
        generate(model, length=4, state=chunks.state).x,
        generate(model, length=4, state=whole.state).x,
    )
    del passes[:]
    long = generate(model, length=4100, chunk=2000, seed=5)  # one row of all steps is too much
    assert passes == [2000, 2000, 100]
    same(long.x, generate(model, length=4100, seed=5).x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_dtype_of_pytorch_changes_nothing(kind, dtype):
    model = small_model(kind)
    x = sequences(model, 2, 40)

    def results():
        torch.manual_seed(1)
        made = generate(model, prompt=x[:, :5], length=7, seed=1)
        loss = objective(model, x).loss.mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        return made.x, log_likelihood(model, x, 3), loss, *(g for g in gradients if g is not None)

    wanted = results()
    torch.set_default_dtype(dtype)
    try:
        given = results()
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(given, wanted, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)
