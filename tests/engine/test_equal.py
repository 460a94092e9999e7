"""What an engine generates is what `vssm.generate` generates, recorded or not."""

import numpy as np
import pytest
import torch

import vssm
from tests.conftest import (
    KINDS,
    relative_error,
    same,
    same_results,
    same_states,
    sequences,
    small_model,
)
from vssm import Engine, State
from vssm.engine import stepwise
from vssm.engine.loops import decode_step
from vssm.nn.stack import sinusoids

PARALLEL = ("tvae", "vssm")
STEPWISE = ("transformer", "ssm", "rnn", "vrnn")
MODELS = [
    *({"kind": kind} for kind in KINDS),
    {"kind": "vssm", "levels": 3, "latents": 6},
    {"kind": "vssm", "levels": 2, "latents": 4, "spans": (4, 1)},
]
LENGTH = 23  # is recorded as blocks of 16, 4, 1, 1 and 1 steps


def check(model, engine, counts, times=3, **options):
    """Calls the engine until it replays, each time beside a plain call."""
    options = {"length": LENGTH, **options}
    for seed in range(times):
        if "state" not in options:
            options["seed"] = seed
        before = counts.recorded, counts.replayed
        made = engine.generate(**options)
        same_results(made, vssm.generate(model, **options))
    assert counts.replayed > before[1], "the last call is replayed"
    assert counts.recorded == before[0], "the last call is not recorded again"
    return made


@pytest.mark.parametrize("what", ["mean", "sample"])
@pytest.mark.parametrize("options", MODELS, ids=str)
def test_an_engine_equals_plain_generation(options, what, device, counts, monkeypatch):
    monkeypatch.setattr(stepwise, "_ROOM", 8)  # key-value caches grow from 8 to 64 steps
    model = small_model(**options).to(device)
    engine = Engine(model)
    x = sequences(model, 3, 5).to(device)
    check(model, engine, counts, num=3, observe=what)
    check(model, engine, counts, prompt=x, observe=what, temperature=0.7)
    check(model, engine, counts, num=3, prompt=x[:1], observe=what)
    state = engine.observe(x, seed=4)
    check(model, engine, counts, state=state, observe=what)
    check(model, engine, counts, state=state, prompt=x, observe=what)
    resumed = vssm.generate(model, num=2, length=3).state
    check(model, engine, counts, state=resumed, observe=what)


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_reading_equals_plain_reading(options, device):
    model = small_model(**options).to(device)
    x, engine = sequences(model, 3, 6).to(device), Engine(model)
    for given in ({"num": 3}, {"num": 3, "seed": 7}, {"rows": [4, 0, 9]}):
        start = x[:1] if "num" in given else x
        states = engine.observe(start, **given), vssm.observe(model, start, **given)
        same_states(*states)
        same_states(engine.observe(x, states[0]), vssm.observe(model, x, states[1]))


@pytest.mark.parametrize(
    "dials", [{"chunk": 3}, {"chunk": 3, "recondition": True}, {"recondition": True}]
)
@pytest.mark.parametrize("options", [*MODELS[3:4], *MODELS[5:]], ids=str)
def test_chunks_equal_plain_chunks(options, dials, device, counts):
    model = small_model(**options).to(device)
    engine, prompt = Engine(model), sequences(model, 2, 3).to(device)
    for start in ({"num": 2}, {"prompt": prompt}, {"state": vssm.observe(model, prompt)}):
        check(model, engine, counts, length=7, **dials, **start)


@pytest.mark.parametrize(
    "dials", [{"passes": 2}, {"passes": 3}, {"passes": 2, "chunk": 3}], ids=str
)
@pytest.mark.parametrize("kind", PARALLEL)
def test_passes_equal_plain_passes(kind, dials, device, counts):
    model = small_model(kind).to(device)
    engine, prompt = Engine(model), sequences(model, 2, 3).to(device)
    state = vssm.observe(model, prompt)
    for start in ({"num": 2}, {"prompt": prompt}, {"state": state, "observe": "sample"}):
        check(model, engine, counts, length=7, **dials, **start)


@pytest.mark.parametrize(
    "head", ["gaussian-learned", "bernoulli", "categorical", "logistic-mixture"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_head_equals_the_plain_one(kind, head, device, counts):
    model = small_model(kind, head).to(device)
    engine = Engine(model)
    check(model, engine, counts, num=2, length=5, observe="sample")
    check(model, engine, counts, prompt=sequences(model, 2, 3).to(device), length=5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_seeds_name_the_noise(kind, device, counts):
    model = small_model(kind).to(device)
    engine, options = Engine(model), {"length": 5, "observe": "sample"}
    for seed in (
        3,
        -(2**63),
        2**63 - 1,
        np.int64(3),
        torch.tensor(-1),
        torch.tensor([5, -(2**63)]),
    ):
        for _ in range(3):
            made = engine.generate(num=2, seed=seed, rows=[7, 2**61], **options)
        same_results(made, vssm.generate(model, num=2, seed=seed, rows=[7, 2**61], **options))
    assert counts.replayed
    whole = vssm.generate(model, num=6, seed=3, **options).x
    parts = [engine.generate(num=3, seed=3, rows=range(i, i + 3), **options).x for i in (0, 3)]
    same(torch.cat(parts), whole)


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_seeds_of_64_bits_are_replayed(seed, device, counts):
    model = small_model("vssm").to(device)
    engine = Engine(model)
    check(model, engine, counts, num=2)
    before = counts.replayed
    made = engine.generate(num=2, length=LENGTH, seed=seed)
    assert counts.replayed == before + 1
    assert made.state["seed"].tolist() == [seed, seed]
    same_results(made, vssm.generate(model, num=2, length=LENGTH, seed=seed))


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_a_stream_of_chunks_equals_one_call(options, device, counts):
    model = small_model(**options).to(device)
    engine = Engine(model)
    whole = vssm.generate(model, num=2, length=30, seed=3)
    made = engine.generate(num=2, length=5, seed=3)
    xs = [made.x]
    for _ in range(5):
        made = engine.generate(length=5, state=made.state)
        xs.append(made.x)
    same(torch.cat(xs, 1), whole.x)
    assert made.state.position == 30
    if options == {"kind": "vssm"}:  # its recording knows no position, so it serves all chunks
        assert (counts.recorded, counts.replayed) == (1, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_in_another_order_is_accepted(kind, device, counts):
    """A state from a file may have its names in any order."""
    model = small_model(kind).to(device)
    engine = Engine(model)
    state = vssm.observe(model, sequences(model, 3, 4).to(device))

    def reverse(tree):
        children = {
            name: reverse(child) if isinstance(child, State) else child
            for name, child in reversed(tree.children.items())
        }
        return State(children, tree.position, tree.owner)

    check(model, engine, counts, state=state)
    check(model, engine, counts, state=reverse(state))


@pytest.mark.parametrize("kind", KINDS)
def test_other_dtypes_equal_the_plain_ones(kind, device, counts):
    model = small_model(kind).to(device, torch.float64)
    made = check(model, Engine(model), counts, num=2)
    assert made.x.dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
def test_every_mode_of_gradients_gives_the_same(kind, device):
    model = small_model(kind).to(device)
    engine, prompt = Engine(model), sequences(model, 2, 3).to(device)
    for options in ({"num": 2}, {"prompt": prompt}):
        wanted = vssm.generate(model, length=5, **options)
        for mode in 2 * (torch.inference_mode, torch.enable_grad, torch.no_grad):
            with mode():
                made = engine.generate(length=5, **options)
            same_results(made, wanted)
            assert made.x.is_inference() == (mode is torch.inference_mode)
            assert not made.x.requires_grad


def test_autocast_runs_as_plain_generation_does(device, counts):
    model = small_model("vssm").to(device)
    engine, options = Engine(model), {"num": 64, "length": 12, "seed": 1}
    for _ in range(3):
        engine.generate(**options)
    replayed = counts.replayed
    with torch.autocast(device.type, torch.bfloat16):
        half = engine.generate(**options)
        assert torch.equal(half.z, vssm.generate(model, **options).z)
    assert counts.replayed == replayed
    assert not torch.equal(half.z, engine.generate(**options).z), "precision matters here"


def test_recomputing_the_prefix_equals_plain_recomputing(device):
    model = small_model("transformer").to(device)
    made = Engine(model).generate(num=2, length=6, cache=False, seed=1)
    same_results(made, vssm.generate(model, num=2, length=6, cache=False, seed=1))


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_no_steps(options, device):
    model = small_model(**options).to(device)
    engine, prompt = Engine(model), sequences(model, 2, 3).to(device)
    for given in ({"num": 2}, {"prompt": prompt}):
        same_results(engine.generate(length=0, **given), vssm.generate(model, length=0, **given))


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_slabs_equal_one_pass(options, device, counts, monkeypatch):
    """A vssm that is made in slabs of rows is not recorded: it keeps the device busy anyway."""
    model = small_model(**options).to(device)
    engine, x = Engine(model), sequences(model, 5, 4).to(device)
    starts = [{"num": 5}, {"prompt": x}, {"state": vssm.observe(model, x)}]
    wholes = [vssm.generate(model, length=6, **start) for start in starts]
    monkeypatch.setattr("vssm.sampling.request.bytes_of_slab", lambda device: 1)
    for start, whole in zip(starts, wholes, strict=True):
        for _ in range(3):
            same_results(engine.generate(length=6, **start), whole)
    assert bool(counts.recorded) == (options["kind"] not in PARALLEL)


def test_chunks_that_do_not_fit_equal_one_pass(device, monkeypatch):
    """The pass over empty tokens that an engine keeps ends where a chunk that fits ends."""
    model = small_model("vssm").to(device)
    engine, options = Engine(model), {"num": 2, "length": 40}
    whole = vssm.generate(model, **options)
    monkeypatch.setattr("vssm.sampling.parallel._EMPTY_STEPS", 4)
    monkeypatch.setattr("vssm.sampling.request.SHORTEST", 2)
    monkeypatch.setattr("vssm.sampling.request.bytes_of_step", lambda *arguments: 10**6)
    monkeypatch.setattr("vssm.sampling.request.bytes_of_slab", lambda device: 11 * 10**6)
    for _ in range(3):
        same_results(engine.generate(chunk=8, **options), whole)


def test_a_transformer_in_slabs_equals_one_pass(device, monkeypatch):
    model = small_model("transformer").to(device)
    engine, x = Engine(model), sequences(model, 5, 4).to(device)
    starts = [{"num": 5}, {"prompt": x}, {"num": 5, "prompt": x[:1]}]
    wholes = [vssm.generate(model, length=6, **start) for start in starts]
    monkeypatch.setattr("vssm.sampling.request.rows_of_cache", lambda model, num, steps: 2)
    for start, whole in zip(starts, wholes, strict=True):
        for _ in range(3):
            same_results(engine.generate(length=6, **start), whole)


def test_long_loops_are_recorded_in_the_first_call(device, counts):
    model = small_model("ssm").to(device)
    check(model, Engine(model), counts, times=2, num=1, length=70)


@torch.no_grad()
def test_a_decoded_step_equals_the_plain_one(device):
    """In float64, with a room of 256 steps, over which sums are cut into parts."""
    model = small_model("transformer").to(device).double()
    stack = model.stack
    e = torch.randn(1, 150, 16, dtype=torch.float64, device=device)
    expected, state = stack.run(e)
    caches = []
    for i in range(len(stack.blocks)):
        cache = torch.zeros(2, 1, 2, 256, 8, dtype=torch.float64, device=device)
        for part, name in zip(cache, ("k", "v"), strict=True):
            part[:, :, :149] = state.child(str(i))[name][:, :, :149]
        caches.append(cache)
    codes = sinusoids(0, 256, 16, device, torch.float64)
    y = decode_step(stack, e[:, 149:], caches, torch.tensor([149], device=device), codes)
    assert relative_error(y, expected[:, 149:]) < 1e-12
    assert relative_error(caches[1][1, :, :, :150], state.child("1")["v"]) < 1e-12


@pytest.mark.parametrize("lines", [{}, {"interpolate": True, "season": 2}], ids=str)
@pytest.mark.parametrize("options", [{}, {"passes": 3}, {"num": 2, "observe": "sample"}], ids=str)
def test_filling_equals_plain_filling(options, lines, device, counts):
    sizes = {"known": "any", "window": 4, "levels": 2, "latents": 4, "spans": (4, 1), "given": 1}
    model = small_model("vssm", **sizes, **lines).to(device)
    engine = Engine(model)
    for seed in range(3):
        x = torch.rand(3, 10, model.config.features, generator=torch.Generator().manual_seed(seed))
        x[..., :2] = torch.where(torch.rand(3, 10, 2) < 0.5, torch.nan, x[..., :2])
        x = x.to(device)
        same(engine.fill(x, seed=seed, **options), vssm.fill(model, x, seed=seed, **options))
    assert counts.recorded == 1 and counts.replayed == 2


@pytest.mark.parametrize("dials", [{}, {"passes": 3}, {"chunk": 4, "recondition": True}], ids=str)
def test_any_part_known_equals_plain_generation(dials, device, counts):
    """From a state the position is recorded, too: windows begin at multiples of their size."""
    model = small_model("vssm", known="any", window=4, levels=2, latents=4, spans=(4, 1))
    model = model.to(device)
    engine, prompt = Engine(model), sequences(model, 2, 6).to(device)
    state = vssm.observe(model, prompt)
    for start in ({"num": 2}, {"prompt": prompt}, {"state": state}, {"state": state, "length": 7}):
        check(model, engine, counts, observe="sample", **{"length": 9, **start, **dials})
    made = engine.generate(length=5, seed=1, **dials)
    for _ in range(3):
        made = engine.generate(length=5, state=made.state, **dials)
    same(made.x, vssm.generate(model, length=20, seed=1, **dials).x[:, 15:])
