"""A replayed call equals the plain one, whatever changed in between.

Without a GPU a recording runs its function again on the static tensors: all is tested but the capture.
"""

import copy
import gc
import pickle
import sys
import threading
import warnings
import weakref
from dataclasses import FrozenInstanceError, replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.conftest import KINDS, relative_error, sequences, small_model
from vssm import generate, observe, sampling
from vssm.config import ModelConfig
from vssm.data import Meta
from vssm.engine import graphs, trees
from vssm.engine.recording import OneShot, Recorder, Recording
from vssm.engine.watch import Watch
from vssm.engine.weights import first_weight
from vssm.forecasting.forecaster import Forecaster
from vssm.models import build
from vssm.nn import State
from vssm.nn.attention import AttentionBlock
from vssm.sampling import slabs, stepwise
from vssm.sampling.parallel import _empty_runs

PARALLEL = ("tvae", "vssm")
STEPWISE = ("transformer", "ssm", "rnn", "vrnn")
TOLERANCE = 1e-5
LENGTH = 23  # blocks of 16, 4, 1, 1 and 1 steps


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    monkeypatch.setattr(graphs, "DEVICES", ("cuda", "cpu"))
    return torch.device(request.param)


@pytest.fixture
def replays(monkeypatch):
    """Counts what is recorded and replayed."""
    counts = {"recorded": 0, "replayed": 0}
    record, replay = Recorder.record, Recording.replay

    def counting_record(*arguments):
        counts["recorded"] += 1
        return record(*arguments)

    def counting_replay(*arguments):
        counts["replayed"] += 1
        return replay(*arguments)

    monkeypatch.setattr(Recorder, "record", counting_record)
    monkeypatch.setattr(Recording, "replay", counting_replay)
    return counts


def same(a, b):
    assert (a is None) == (b is None)
    if a is not None:
        assert a.shape == b.shape and a.dtype == b.dtype
        assert relative_error(a, b) < TOLERANCE


def same_states(a, b):
    assert (a.position, a.owner, list(a.children)) == (b.position, b.owner, list(b.children))
    for name, child in a.children.items():
        if isinstance(child, torch.Tensor):
            same(child, b[name])
        else:
            same_states(child, b.child(name))


def same_results(a, b):
    same(a.x, b.x)
    same(a.z, b.z)
    same_states(
        *(State(dict(sorted(some.children.items())), some.position) for some in (a.state, b.state))
    )


def programs(model):
    return graphs._kept[model].programs


def check(model, replays, times=3, **options):
    """Calls with other seeds until the call is replayed, each time beside the plain path."""
    length = options.pop("length", LENGTH)
    for seed in range(times):
        if "state" not in options:
            options["seed"] = seed
        before = dict(replays)
        out = generate(model, length=length, **options)
        same_results(out, generate(model, length=length, graphs=False, **options))
    assert replays["replayed"] > before["replayed"], "the last call was replayed"
    assert replays["recorded"] == before["recorded"], "and not recorded again"
    return out


@pytest.mark.parametrize("what", ["mean", "sample"])
@pytest.mark.parametrize("kind", KINDS)
def test_replayed_equals_plain(kind, what, device, replays, monkeypatch):
    monkeypatch.setattr(stepwise, "_ROOM", 8)  # caches grow from 8 to 16, 32 and 64 steps
    model = small_model(kind).to(device)
    prompt = sequences(model, 3, 5).to(device)
    check(model, replays, num=3, observe=what)
    check(model, replays, prompt=prompt, observe=what, temperature=0.7)
    check(model, replays, num=3, prompt=prompt[:1], observe=what)
    check(model, replays, state=observe(model, prompt, seed=4), observe=what)
    check(model, replays, state=observe(model, prompt, seed=4), prompt=prompt, observe=what)
    resumed = generate(model, num=2, length=3, graphs=False).state
    check(model, replays, state=resumed, observe=what)


@pytest.mark.parametrize("kind", STEPWISE)
def test_a_state_in_another_order_is_replayed(kind, device, replays):
    """As from a file, where the order of names is any."""
    model = small_model(kind).to(device)
    state = observe(model, sequences(model, 3, 4).to(device))

    def reverse(tree):
        children = {
            n: reverse(c) if isinstance(c, State) else c for n, c in reversed(tree.children.items())
        }
        return State(children, tree.position, tree.owner)

    last = check(model, replays, state=state)
    before = dict(replays)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same_results(generate(model, length=LENGTH, state=reverse(state)), last)
    assert replays["replayed"] > before["replayed"]


@pytest.fixture
def slab(monkeypatch):
    """Sets how many steps, of all rows together, a slab may have, and counts calls that are divided."""
    divided, room = [], slabs._room

    def counting(made, num):
        divided.append(num)
        return room(made, num)

    def allow(steps):
        monkeypatch.setattr(slabs, "bytes_of_slab", lambda device: steps)
        monkeypatch.setattr(slabs, "_bytes_of_step", lambda *arguments: 1)
        monkeypatch.setattr(slabs, "_LOGITS", 0)
        divided.clear()
        return divided

    monkeypatch.setattr(slabs, "_room", counting)
    return allow


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    "options",
    [*({"kind": kind} for kind in KINDS), {"kind": "vssm", "levels": 2, "latents": 4}],
    ids=str,
)
def test_slabs_of_rows_equal_all_rows_at_once(options, recorded, device, replays, slab):
    model = small_model(**options).to(device)
    kind, parallel = options["kind"], options["kind"] in PARALLEL
    prompts, seeds = sequences(model, 5, 4).to(device), torch.arange(5, device=device) + 7
    read = observe(model, prompts[:, :2], seed=3)
    starts = [{"num": 5}, {"num": 5, "prompt": prompts[:1]}, {"prompt": prompts, "seed": seeds}]
    starts += [{"state": read}, {"state": read, "prompt": prompts}]
    if parallel:
        starts += [
            {"num": 5, "chunk": 3, "recondition": True},
            {"prompt": prompts, "length": 0, "chunk": 8},
        ]
    wholes = [generate(model, graphs=False, **{"length": 6} | start) for start in starts]
    for start, whole in zip(starts, wholes, strict=True):
        divided = slab(2 * 6)  # two rows of six steps
        for _ in range(3):
            made = generate(model, graphs=recorded, **{"length": 6} | start)
            same_results(made, whole)
            rests = [
                generate(model, length=3, state=state, graphs=False)
                for state in (made.state, whole.state)
            ]
            same_results(*rests)
        read_apart = kind in ("transformer", "ssm") and len(start.get("prompt", ())) > 1
        assert bool(divided) == (parallel or read_apart)
    # Steps that follow one another are replayed; passes that were divided are not even recorded.
    assert bool(replays["replayed"]) == bool(replays["recorded"]) == (recorded and not parallel)
    divided = slab(1)
    same_states(observe(model, prompts[:, :2], seed=3), read)
    assert bool(divided) == (kind not in ("rnn", "vrnn"))


@pytest.mark.parametrize("recorded", [False, True])
def test_long_sequences_are_made_in_chunks_that_fit(recorded, device, slab, monkeypatch):
    model = small_model("vssm").to(device)
    prompts = sequences(model, 2, 3).to(device)
    starts = [
        {"num": 2},
        {"prompt": prompts},
        {"state": observe(model, prompts)},
        {"num": 2, "chunk": 8},
    ]
    starts += [{"num": 2, "chunk": 4}, {"prompt": prompts, "length": 0, "chunk": 9}]
    # Seven steps fit: two chunks of six and five; after a prompt of three, three chunks of four.
    split = [[6, 5], [7, 4, 3], [6, 5], [6, 5], [4, 4, 3], []]
    wholes = [generate(model, graphs=False, **{"length": 11} | start) for start in starts]
    monkeypatch.setattr(slabs, "_SHORTEST", 2)
    divided, widths, draw = slab(2 * 7), [], sampling.parallel.draw

    def counting(q_z, u, *rest):
        widths.append(u.shape[1])
        return draw(q_z, u, *rest)

    monkeypatch.setattr(sampling.parallel, "draw", counting)
    for start, whole, chunks in zip(starts, wholes, split, strict=True):
        for _ in range(3):
            widths.clear()
            same_results(generate(model, graphs=recorded, **{"length": 11} | start), whole)
            assert recorded or widths == chunks
    assert not divided


@pytest.mark.parametrize("room", [1, 200, 256, 300, 1000])
def test_chunks_are_not_short(room, slab):
    """Those that fit are made; where these would have fewer than 256 steps, rows are divided instead."""
    slab(4 * room)
    model = small_model("vssm")
    for length in (1, 255, 256, 257, 300, 511, 512, 513, 1000, 1024, 4095):
        for chunk in (length, 100, 290):
            options = sampling.Options(length, chunk, False, 1, 1.0, False)
            fits = slabs.fitting(model, options, 4, 0, False).chunk
            if min(chunk, length) <= max(room, 256):
                assert fits == chunk
            else:
                assert fits <= chunk and 256 <= fits <= max(room, 511)


def test_latents_of_the_one_row_that_all_are_made_from_count():
    model = small_model("vssm", latents=32, classes=32)
    options = sampling.Options(10**6, 10**6, False, 1, 1.0, False)
    one, many = (slabs.fitting(model, options, num, 0, False).chunk for num in (1, 1000))
    step = slabs._bytes_of_step(model, next(model.parameters()), False)
    logits = 3 * 32 * 32 * 4
    for num, chunk in ((1, one), (1000, many)):
        assert chunk * (num * step + logits) <= 2**32 < (chunk + chunk // 2) * (num * step + logits)


def test_only_a_vssm_makes_chunks_of_its_own(slab, monkeypatch):
    model = small_model("tvae")
    whole = generate(model, num=4, length=9)
    monkeypatch.setattr(slabs, "_SHORTEST", 2)
    divided = slab(4 * 5)
    same_results(generate(model, num=4, length=9), whole)
    assert set(divided) == {4}


@pytest.mark.parametrize(
    "options", [{"recondition": True}, {"passes": 2}, {"recondition": True, "chunk": 4}]
)
def test_chunks_that_mean_something_stay(options, slab, monkeypatch):
    model = small_model("vssm")
    whole = generate(model, num=2, length=9, **options)
    monkeypatch.setattr(slabs, "_SHORTEST", 2)
    slab(3)
    same_results(generate(model, num=2, length=9, **options), whole)


@pytest.mark.parametrize("rows", [2, 1])
@pytest.mark.parametrize("kind", PARALLEL)
def test_slabs_share_what_all_rows_share(kind, rows, device, slab):
    """Where there is room for one row only, two are made: the states of single rows would not be shared."""
    model = small_model(kind).to(device)
    for prompt in (None, sequences(model, 1, 3).to(device)):
        whole = generate(model, num=5, length=5, prompt=prompt, graphs=False)
        divided = slab(rows * (5 if prompt is None else 8))
        made = generate(model, num=5, length=5, prompt=prompt)
        assert divided
        same_results(made, whole)
        assert all(tensor.stride(0) == 0 for tensor in made.state.child("blind").leaves())
        assert all(tensor.stride(0) > 0 for tensor in made.state.child("decoder").leaves())
        slab(2**20)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_transformer_whose_cache_would_not_fit_is_divided(
    recorded, device, replays, slab, monkeypatch
):
    model = small_model("transformer").to(device)
    prompts, seeds = sequences(model, 5, 4).to(device), torch.arange(5, device=device) + 7
    read = observe(model, prompts[:, :2], seed=3)
    starts = [{"num": 5}, {"num": 5, "prompt": prompts[:1]}, {"prompt": prompts, "seed": seeds}]
    starts += [{"state": read}, {"prompt": prompts, "length": 0}]
    wholes = [generate(model, graphs=False, **{"length": 6} | start) for start in starts]
    divided = slab(2**30)
    monkeypatch.setattr(sampling, "rows_of_cache", lambda model, num, steps: 2)
    for start, whole in zip(starts, wholes, strict=True):
        divided.clear()
        for _ in range(3):
            made = generate(model, graphs=recorded, **{"length": 6} | start)
            same_results(made, whole)
            rests = [
                generate(model, length=3, state=state, graphs=False)
                for state in (made.state, whole.state)
            ]
            same_results(*rests)
        assert divided
    assert bool(replays["replayed"]) == recorded


def test_rows_of_a_cache(monkeypatch):
    model = small_model("transformer")
    row = 2 * 16 * 2 * 4  # keys and values of a step: width, layers, bytes
    assert slabs.rows_of_cache(model, 10**9, 10**9) == 10**9, "a CPU is not divided"
    monkeypatch.setattr(slabs, "_bytes_of_device", lambda device: 10 * 100 * row)
    assert slabs.rows_of_cache(model, 2, 100) == 2  # 750 of 900
    # The state of 3 leaves room for one more with its copies, 600 of 375; that of 6 none for 375.
    assert [slabs.rows_of_cache(model, num, 100) for num in (3, 5, 6)] == [1, 1, 6]
    assert slabs.rows_of_cache(model, 30, 10) == 15  # as equal as can be, of 16
    assert slabs.rows_of_cache(small_model("ssm"), 100, 100) == 100


def test_rows_of_a_slab(slab):
    model = small_model("ssm")
    slab(12)
    assert [slabs.rows_of_slab(model, 5, steps, False) for steps in (0, 1, 2, 3, 4, 6, 12, 13)] == (
        [5, 5, 5, 3, 3, 2, 1, 1]
    )
    assert [slabs.rows_of_slab(model, num, 12, False, least=2) for num in (1, 2, 3, 5, 6)] == [
        1,
        2,
        2,
        2,
        2,
    ]


@pytest.mark.parametrize("kind", ["transformer", "ssm"])
def test_prompts_that_are_read_in_slabs_are_not_recorded(kind, device, replays, slab):
    model = small_model(kind).to(device)
    prompts = sequences(model, 5, 4).to(device)
    slab(2 * 4)
    for _ in range(3):
        generate(model, prompt=prompts, length=0)
    assert replays["recorded"] == 0
    check(model, replays, prompt=prompts[:2])  # fits: both parts are
    assert sum(isinstance(program, OneShot) for program in programs(model).values()) == 1


class Live(TorchDispatchMode):
    """Adds up the memory of all tensors that are alive, and remembers the most."""

    def __init__(self):
        super().__init__()
        self.seen, self.now, self.most = set(), 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.seen:
                    self.seen.add(key)
                    self.now += size
                    weakref.finalize(storage, self._gone, key, size)
        self.most = max(self.most, self.now)
        return made

    def _gone(self, key, size):
        self.seen.discard(key)
        self.now -= size


@pytest.mark.parametrize("kind", ["transformer", "ssm", "tvae", "vssm"])
def test_slabs_take_less_memory_than_one_pass(kind, slab):
    """States are views of what a pass made: a slab must not keep it."""
    model = small_model(kind, layers=4)
    x = sequences(model, 16, 64)
    most = []
    for rows in (16, 1):
        slab(rows * 64)
        with Live() as live:
            state = observe(model, x)
        most.append(live.most)
    assert most[1] - state_bytes(state) < (most[0] - state_bytes(state)) / 3


@pytest.mark.parametrize("layers", [1, 4, 12])
@pytest.mark.parametrize(
    ("kind", "start"),
    [(kind, start) for kind in PARALLEL for start in ("nothing", "prompt", "read")]
    + [("transformer", "read"), ("ssm", "read")],
)
def test_a_slab_takes_what_is_expected(kind, start, layers):
    sizes = {"features": 8, "width": 64, "latents": 8, "classes": 8}
    model = small_model(kind, layers=layers, **sizes)
    x, num, steps = sequences(model, 12, 96), 12, 96
    live = Live()
    live.seen |= {weight.untyped_storage()._cdata for weight in model.parameters()}
    with live:
        if start == "read":
            observe(model, x)
        elif start == "prompt":
            generate(model, prompt=x, length=96, graphs=False)
            steps = 2 * 96
        else:
            generate(model, num=num, length=96, graphs=False)
    reads = kind in PARALLEL and start != "nothing"
    expected = num * steps * slabs._bytes_of_step(model, first_weight(model), reads)
    assert 0.6 < live.most / expected < 1.25


def state_bytes(state):
    return sum(tensor.nbytes for tensor in state.leaves())


@pytest.mark.gpu
def test_memory_does_not_grow_with_the_number_of_sequences(monkeypatch):
    monkeypatch.setattr(slabs, "bytes_of_slab", lambda device: 2**30)
    model = small_model("vssm", width=256, layers=2).to("cuda")
    peaks = []
    for num in (64, 1024):  # at once, and in chunks of time
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = generate(model, num=num, length=1024, graphs=False)
        own = made.x.nbytes + made.z.nbytes + state_bytes(made.state)
        peaks.append(torch.cuda.max_memory_allocated() - before - own)
    assert peaks[1] < 2 * 2**30 and peaks[1] < 4 * peaks[0]


@pytest.mark.parametrize("kind", PARALLEL)
def test_replayed_chunks_equal_plain(kind, device, replays):
    model = small_model(kind).to(device)
    prompt = sequences(model, 2, 3).to(device)
    for options in ({"num": 2}, {"prompt": prompt}, {"state": observe(model, prompt)}):
        for recondition in (False, True):
            check(model, replays, length=7, chunk=3, recondition=recondition, **options)


@pytest.mark.parametrize("kind", PARALLEL)
def test_replayed_passes_equal_plain(kind, device, replays):
    model = small_model(kind).to(device)
    prompt = sequences(model, 2, 3).to(device)
    for options in (
        {"num": 2},
        {"prompt": prompt},
        {"state": observe(model, prompt), "observe": "sample"},
    ):
        for passes, chunk in ((2, None), (3, None), (2, 3)):  # each its own program
            check(model, replays, length=7, passes=passes, chunk=chunk, **options)


@pytest.mark.parametrize(
    "head", ["gaussian-learned", "bernoulli", "categorical", "logistic-mixture"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_replayed_heads_equal_plain(kind, head, device, replays):
    model = small_model(kind, head).to(device)
    check(model, replays, num=2, length=5, observe="sample")
    check(model, replays, prompt=sequences(model, 2, 3).to(device), length=5)


def test_a_transformer_decodes_in_double_and_in_few_parts(device):
    """The attention of `decode` against the plain block, with a room that is cut into parts."""
    torch.manual_seed(0)
    block = AttentionBlock(small_model("transformer").config).to(device).double()
    x = torch.randn(1, 150, 16, dtype=torch.float64, device=device)
    cache = torch.zeros(2, 1, 2, 256, 8, dtype=torch.float64, device=device)
    expected, state = block(x)
    cache[0, :, :, :149], cache[1, :, :, :149] = state["k"][:, :, :149], state["v"][:, :, :149]
    mask = torch.zeros(256, dtype=torch.float64, device=device)
    mask[150:] = -torch.inf
    y = block.decode(x[:, 149:], cache, torch.tensor([149], device=device), mask)
    assert relative_error(y, expected[:, 149:]) < 1e-12
    assert relative_error(cache[1, :, :, :150], state["v"]) < 1e-12


def test_a_step_of_a_gru_equals_its_layer(device):
    block = small_model("rnn").to(device).double().stack.blocks[0]  # cuDNN's float32 is TF32
    x = torch.randn(3, 6, 16, device=device, dtype=torch.float64)
    whole, _ = block(x)
    y, state = block(x[:, :1])
    assert relative_error(y, whole[:, :1]) < 1e-12
    y, state = block(x[:, 2:], block(x[:, 1:2], state)[1])
    assert relative_error(y, whole[:, 2:]) < 1e-12
    assert state.position == 6


def test_long_loops_are_recorded_at_once(device, replays):
    model = small_model("ssm").to(device)
    check(model, replays, times=2, num=1, length=70)


def test_a_stream_of_chunks_is_one_program(device, replays):
    """A recurrence does not know where it is: every resumed chunk replays the same graph."""
    model = small_model("vssm").to(device)
    whole = generate(model, num=2, length=30, seed=3, graphs=False)
    out = generate(model, num=2, length=5, seed=3)
    xs = [out.x]
    for _ in range(5):
        out = generate(model, length=5, state=out.state)
        xs.append(out.x)
    same(torch.cat(xs, 1), whole.x)
    same_states(out.state, whole.state)
    assert replays == {"recorded": 1, "replayed": 4}


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_not_changed_by_later_calls(kind, device):
    model = small_model(kind).to(device)
    prompt = sequences(model, 2, 3).to(device)
    outs = [generate(model, length=6, prompt=prompt, seed=seed) for seed in range(4)]
    copies = [(out.x.clone(), out.state.map(torch.clone)) for out in outs[2:]]
    for seed in range(4, 6):
        generate(model, length=6, prompt=prompt, seed=seed)
    for out, (x, state) in zip(outs[2:], copies, strict=True):
        assert torch.equal(out.x, x)
        same_states(out.state, state)
    assert relative_error(outs[2].state["seed"], outs[3].state["seed"]) > 0


def memory(*tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def static_memory(model):
    """Where the programs of a model read and write."""
    found = set()
    for program in programs(model).values():
        if isinstance(program, OneShot):
            found |= memory(
                *program.static, *program.fixed.leaves(), *program.recording.outputs.leaves()
            )
        else:
            found |= memory(*program.carried.leaves(), *getattr(program, "caches", ()))
            for static, recording in program._blocks.values():
                found |= memory(*static, *recording.outputs.leaves())
    return found


@pytest.mark.parametrize("large", [1, 64, 1 << 20])
@pytest.mark.parametrize("kind", KINDS)
def test_results_have_memory_of_their_own(kind, large, device, replays, monkeypatch):
    """With tensors in memory of their own from 1 byte on, from 64 bytes on, and all together."""
    monkeypatch.setattr(trees, "_LARGE", large)
    model = small_model(kind).to(device)
    prompt = sequences(model, 2, 3).to(device)
    weights = memory(*model.parameters())
    for options in ({"num": 3}, {"prompt": prompt}, {"num": 2, "prompt": prompt[:1]}):
        check(model, replays, length=6, **options)
        seen = static_memory(model) | weights
        for seed in range(2):
            x, z, state = generate(model, length=6, seed=seed, **options)
            if "prompt" not in options:
                state.children.pop(
                    "blind", None
                )  # the pass over empty tokens, which all calls share
            results = memory(x) if z is None else memory(x, z)
            assert not results & memory(*state.leaves()), "who keeps x does not keep the state"
            mine = results | memory(*state.leaves())
            assert not mine & seen
            seen |= mine


def test_results_can_be_written_to(device, replays):
    model = small_model("vssm").to(device)
    first = check(model, replays, num=3)
    assert first.state["row"].tolist() == [0, 1, 2] and first.state["seed"].tolist() == [2, 2, 2]
    for tensor in (first.x, first.z, first.state["seed"], first.state["row"]):
        tensor.zero_()
    for tensor in first.state.child("decoder").leaves():
        tensor.zero_()
    check(model, replays, times=1, num=3)


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_seeds_of_64_bits_are_replayed(seed, device, replays):
    model = small_model("vssm").to(device)
    check(model, replays, num=2)
    before = dict(replays)
    out = generate(model, num=2, length=LENGTH, seed=seed)
    assert replays["replayed"] == before["replayed"] + 1
    assert out.state["seed"].tolist() == [seed, seed]
    for other in (torch.tensor([seed, seed]), torch.tensor(seed)):
        same_results(out, generate(model, num=2, length=LENGTH, seed=other, graphs=False))
        same_results(out, generate(model, num=2, length=LENGTH, seed=other))
    same_results(out, generate(model, length=LENGTH, num=2, seed=seed, rows=range(2)))
    with pytest.raises(ValueError, match=rf"^seed={2**63} is not allowed"):
        generate(model, num=2, length=LENGTH, seed=2**63)
    with pytest.raises(ValueError, match=r"^seed is bool; allowed: whole numbers of 64 bits"):
        generate(model, num=2, length=LENGTH, seed=True)


def test_a_repeated_request_is_replayed_at_once(device, replays, monkeypatch):
    """Without the checks and the ways that the first calls took, and with the same results."""
    model = small_model("vssm").to(device)
    check(model, replays, num=2, temperature=0.7)
    expected = [
        generate(model, num=2, length=LENGTH, seed=seed, temperature=0.7, graphs=False)
        for seed in (5, 0)
    ]
    module = sys.modules["vssm.sampling.generation"]
    for name in ("sample", "first_weight", "_check_num", "_noise_source"):
        monkeypatch.setattr(module, name, None)
    same_results(generate(model, num=2, length=LENGTH, seed=5, temperature=0.7), expected[0])
    same_results(generate(model, num=2, length=LENGTH, temperature=0.7), expected[1])
    for other in (
        {"num": 3},
        {"seed": torch.tensor(5)},
        {"rows": [0, 1]},
        {"graphs": False},
        {"length": 4},
    ):
        with pytest.raises(TypeError, match="not callable"):
            generate(model, **{"num": 2, "length": LENGTH, "temperature": 0.7, **other})


def test_what_looks_like_a_known_request_is_checked(device):
    """1.0, True and 1 are equal, and a tensor stays the same object while its value changes."""
    model = small_model("vssm").to(device)
    for _ in range(3):
        generate(model, num=1, length=1, passes=1, temperature=1)
    for name, value in (
        ("length", 1.0),
        ("length", True),
        ("passes", True),
        ("num", True),
        ("num", 1.0),
    ):
        with pytest.raises(ValueError, match=rf"^{name}={value} is not allowed"):
            generate(model, **{"num": 1, "length": 1, name: value})
    with pytest.raises(ValueError, match=r"^seed is bool"):
        generate(model, num=1, length=1, seed=True)
    temperature = torch.tensor(1.0)
    for value in 3 * (1.0, 0.01):
        temperature.fill_(value)
        made = generate(model, num=2, length=5, temperature=temperature, seed=3)
        same_results(
            made, generate(model, num=2, length=5, temperature=value, seed=3, graphs=False)
        )


def _add(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01)


def _move(model):
    for weight in model.parameters():
        weight.data = weight.data + 0.01


def _replace(model):
    weight = model.decoder.out.weight
    model.decoder.out.weight = torch.nn.Parameter(weight.detach() + 0.01)


@pytest.mark.parametrize("change", [_add, _move, _replace])
def test_the_same_request_sees_other_weights(change, device, replays):
    model = small_model("vssm").to(device)
    for _ in range(2):
        for _ in range(5):
            made = generate(model, num=2, length=LENGTH, seed=4)
        same_results(made, generate(model, num=2, length=LENGTH, seed=4, graphs=False))
        assert replays["replayed"]
        replays["replayed"] = 0
        change(model)


@pytest.mark.parametrize("kind", ["vssm", "ssm"])
def test_hooks_are_called_at_every_call(kind, device, replays):
    model, seen = small_model(kind).to(device), []
    for _ in range(4):
        wanted = generate(model, num=2, length=LENGTH, seed=4)
    stack = model.decoder if kind == "vssm" else model.stack
    hook = stack.blocks[0].mixer.in_proj.register_forward_hook(lambda *_: seen.append(1))
    for call in range(3):
        seen.clear()
        same_results(generate(model, num=2, length=LENGTH, seed=4), wanted)
        steps = 1 if kind == "vssm" else LENGTH
        assert len(seen) == steps or not call  # without a GPU also by what is replayed in vain
    hook.remove()
    seen.clear()
    replays["replayed"] = 0
    for _ in range(4):
        same_results(generate(model, num=2, length=LENGTH, seed=4), wanted)
    assert not seen and replays["replayed"]


class Louder(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.weight = layer.weight

    def forward(self, x):
        return 2 * torch.nn.functional.linear(x, self.weight)


@pytest.mark.parametrize("kind", ["vssm", "ssm"])
def test_a_module_with_the_weights_of_another_is_noticed(kind, device, replays):
    model = small_model(kind).to(device)
    for _ in range(4):
        before = generate(model, num=2, length=LENGTH, seed=4)
    mixer = (model.decoder if kind == "vssm" else model.stack).blocks[0].mixer
    mixer.x_proj, own = Louder(mixer.x_proj), mixer.x_proj
    for _ in range(4):
        made = generate(model, num=2, length=LENGTH, seed=4)
        same_results(made, generate(model, num=2, length=LENGTH, seed=4, graphs=False))
    assert relative_error(made.x, before.x) > 1e-3
    mixer.x_proj, replays["recorded"] = own, 0
    same(check(model, replays, times=5, num=2).x, before.x)
    assert replays["recorded"]


class Adapter(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.enabled = layer, True
        self.register_buffer("scale", torch.tensor(3.0, device=layer.weight.device))

    def forward(self, x):
        return self.layer(x) * (self.scale if self.enabled else 1)


@pytest.mark.parametrize("part", ["partial", "decoder", "stack"])
def test_a_module_of_somebody_else_is_called_at_every_call(part, device):
    """It may do other things than before, which no weight tells of."""
    model = small_model("ssm" if part == "stack" else "vssm").to(device)
    stack = getattr(model, part)
    stack.out, own = Adapter(stack.out), stack.out
    made = []

    def call():
        for _ in range(4):
            made.append(
                generate(model, num=2, length=LENGTH, seed=4, temperature=0.5, observe="sample")
            )
        options = {"length": LENGTH, "seed": 4, "temperature": 0.5, "observe": "sample"}
        same_results(made[-1], generate(model, num=2, **options, graphs=False))
        return made[-1].x

    loud = call()
    stack.out.enabled = False
    plain = call()
    assert relative_error(loud, plain) > 1e-3
    stack.out.enabled = True
    stack.out.scale.fill_(1)
    same(call(), plain)
    stack.out = own
    same(call(), plain)
    forward = own.forward
    own.forward = lambda *given: 3 * forward(*given)
    same(call(), loud)


def test_hooks_of_the_partial_posterior_are_called_at_every_call(device):
    model, seen = small_model("vssm").to(device), []
    for _ in range(4):
        wanted = generate(model, num=2, length=LENGTH, seed=4)
    hook = model.partial.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    for call in range(3):
        same_results(generate(model, num=2, length=LENGTH, seed=4), wanted)
        assert len(seen) == call + 1
    hook.remove()
    model.partial.out.register_forward_hook(lambda *made: 0 * made[-1])
    assert not torch.equal(generate(model, num=2, length=LENGTH, seed=4).z, wanted.z)


def test_the_same_request_elsewhere(device, replays):
    """In other modes a recording is not what the plain path would do."""
    model = small_model("vssm").to(device)
    for _ in range(5):
        generate(model, num=2, length=LENGTH, seed=4)
    replays["replayed"] = 0
    with torch.autocast(device.type, torch.bfloat16):
        generate(model, num=2, length=LENGTH, seed=4)
    with torch.inference_mode():
        assert generate(model, num=2, length=LENGTH, seed=4).x.is_inference()
    assert not replays["replayed"]
    assert not generate(model, num=2, length=LENGTH, seed=4).x.is_inference()
    assert replays["replayed"] == 1


@pytest.mark.parametrize("changed", [False, True])
def test_what_is_watched_is_told_once_for_each_look(changed, device):
    watch = Watch(lambda model, place: place.copy_(3 + model.bias, non_blocking=True), 5, device)
    model = torch.nn.Module()
    model.bias = torch.tensor(2 + changed, device=device)
    watch.look(model)  # as it is recorded
    for _ in range(2):
        watch.expect()
        watch.look(model)
        assert watch.unchanged() != changed
    watch.look(model)
    watch.expect()
    assert not watch.unchanged(), "what was seen before is not what a replay has seen"


@pytest.mark.parametrize("kind", PARALLEL)
def test_generation_does_not_read_the_encoder(kind, device, replays):
    """So a program stays when only that changes."""
    model = small_model(kind).to(device)
    prompt = sequences(model, 2, 3).to(device)
    ways = [
        {"num": 2},
        {"prompt": prompt},
        {"num": 2, "passes": 2},
        {"num": 2, "observe": "sample", "chunk": 3},
    ]
    expected = [check(model, replays, length=7, **options).x for options in ways]
    state = observe(model, prompt)
    with torch.no_grad():
        for weight in model.encoder.parameters():
            weight.fill_(torch.nan)
    for options, x in zip(ways, expected, strict=True):
        before = dict(replays)
        assert torch.equal(generate(model, length=7, seed=2, **options).x, x)
        assert replays == {**before, "replayed": before["replayed"] + 1}
    same_states(observe(model, prompt), state)


def test_a_tree_is_gathered_in_few_pieces():
    shared, many = torch.arange(3.0), torch.arange(4.0).expand(5, 4)
    tree = State(
        {
            "inner": State({"a": torch.ones(3), "b": State({"c": many, "d": torch.tensor(7)})}),
            "x": torch.ones(2, 3).T,
            "none": torch.empty(0, 2),
            "shared": shared,
            "half": torch.ones(3, dtype=torch.bfloat16),
            "one": State({"e": torch.zeros(2)}),
        }
    )
    tree.children["twice"] = tree["x"]
    gathered = trees.Gathered(tree, {shared.data_ptr()})
    assert len(gathered.pieces) == 3
    copies = gathered.own(9), gathered.own(9)
    for one in copies:
        for (name, made), expected in zip(
            one.children.items(), tree.children.values(), strict=True
        ):
            for a, b in zip(trees.leaves_of(made), trees.leaves_of(expected), strict=True):
                assert torch.equal(a, b) and a.dtype == b.dtype, name
                assert a.numel() == 0 or a is shared or a.data_ptr() % 16 == 0
    first, second = copies
    assert first["shared"].data_ptr() == shared.data_ptr()
    assert first["x"].data_ptr() != first["twice"].data_ptr()
    assert first.child("inner").child("b")["c"].stride() == (0, 1)
    assert first.child("inner").child("b").position == first.position == 9
    assert memory(first["x"], first.child("inner")["a"]).isdisjoint(
        memory(second["x"], second.child("inner")["a"], *gathered.leaves())
    )


def test_a_state_that_is_made_later_is_a_state():
    made = []

    def make():
        made.append(1)
        return {"h": torch.ones(2), "inner": State({"c": torch.zeros(2)}, 4)}

    def later():
        return trees.Later(make, 4, "me")

    state = later()
    assert isinstance(state, State) and (state.position, state.owner, made) == (4, "me", [])
    assert state["h"] is state["h"] and state.batch == 2 and made == [1]
    assert type(state) is State
    for copied in (
        copy.deepcopy(later()),
        pickle.loads(pickle.dumps(later())),
        replace(later()),
        later().detach(),
    ):
        assert type(copied) is State
        same_states(copied, state)
    with pytest.raises(FrozenInstanceError):
        later().position = 5


def test_a_tree_is_gathered_in_the_largest_words_that_fit():
    long, single, half = torch.arange(64), torch.arange(5.0), torch.ones(3, dtype=torch.bfloat16)
    groups = {
        torch.int64: (long, long[:32], single[:4]),
        torch.int32: (long, single[1:]),  # a start that no larger word has
        torch.int16: (single, half),
        torch.uint8: (half, torch.tensor([True])),
    }
    for word, tensors in groups.items():
        tree = State({str(i): tensor for i, tensor in enumerate([*tensors, long[:0]])})
        gathered = trees.Gathered(tree)
        assert {part.dtype for part in gathered.pieces[0]} == {word}
        assert all(len(part) for part in gathered.pieces[0]), "a part without words is slow to join"
        for made, expected in zip(gathered.own(1).leaves(), tree.leaves(), strict=True):
            assert torch.equal(made, expected) and made.dtype == expected.dtype
    nothing = trees.Gathered(State({"a": long[:0], "b": half[:0]})).own(1)
    assert nothing["a"].shape == nothing["b"].shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
def test_new_weights_are_seen(kind, device, replays):
    model, other = small_model(kind).to(device), small_model(kind)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    first = check(model, replays, num=2).x
    model.load_state_dict(other.state_dict())
    assert relative_error(check(model, replays, num=2).x, first) > 1e-3
    model.load_state_dict(
        {n: v.to(device) for n, v in small_model(kind).state_dict().items()}, assign=True
    )
    same(check(model, replays, num=2).x, first)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()  # counts no version
    options = {"num": 2, "length": LENGTH, "seed": 2}
    changed = generate(model, **options)
    same_results(changed, generate(model, **options, graphs=False))
    assert relative_error(changed.x, first) > 1e-3
    assert check(model.double(), replays, num=2).x.dtype == torch.float64


@pytest.mark.parametrize("kind", ["vssm", "ssm"])
def test_what_read_a_weight_where_it_was_is_made_again(kind, device, replays):
    """A program starts before the weights are looked at, which may be in vain."""
    model = small_model(kind).to(device)
    first = check(model, replays, num=2, length=3).x
    options = {"num": 2, "length": 3, "seed": 2}
    stack = model.decoder if kind == "vssm" else model.stack
    for change, back in (
        (lambda w: setattr(w, "data", 2 * w.data), False),
        (lambda w: w.data.mul_(0.5), True),
    ):
        before = dict(replays)
        with torch.no_grad():
            change(stack.out.weight)
            stack.out.bias.add_(0)  # `data` counts no version
        changed = generate(model, **options)
        assert replays["replayed"] > before["replayed"]
        same_results(changed, generate(model, **options, graphs=False))
        assert (relative_error(changed.x, first) < TOLERANCE) == back
        check(model, replays, num=2, length=3)


@pytest.mark.parametrize("kind", ["vssm", "ssm"])
def test_one_element_that_is_written_without_a_version_is_seen(kind, device, replays):
    model = small_model(kind).to(device)
    first = check(model, replays, num=2).x
    stack = model.decoder if kind == "vssm" else model.stack
    weight = next(w for name, w in stack.named_parameters() if name.endswith("in_proj.weight"))
    before, version = dict(replays), weight._version
    weight.data[3, 5] += 1
    assert weight._version == version
    changed = generate(model, num=2, length=LENGTH, seed=2)
    assert replays["replayed"] > before["replayed"] and replays["recorded"] == before["recorded"]
    same_results(changed, generate(model, num=2, length=LENGTH, seed=2, graphs=False))
    assert relative_error(changed.x, first) > TOLERANCE


@pytest.mark.parametrize("kind", ["vssm", "tvae"])
def test_an_optimiser_of_a_part_of_the_weights_is_seen(kind, device, replays):
    model = small_model(kind).to(device)
    check(model, replays, num=2)
    first = generate(model, num=2, length=LENGTH, seed=2)  # which `graphs.same` may find
    weights = list(model.partial.blocks.parameters())  # no part of the probe
    versions = [weight._version for weight in weights]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    torch.optim.AdamW(weights, lr=0.3, fused=True).step()
    assert versions == [weight._version for weight in weights]
    changed = generate(model, num=2, length=LENGTH, seed=2)
    same_results(changed, generate(model, num=2, length=LENGTH, seed=2, graphs=False))
    assert not torch.equal(changed.z, first.z)
    before = replays["replayed"]
    for _ in range(3):
        again = generate(model, num=2, length=LENGTH, seed=2)
    same_results(again, changed)
    assert replays["replayed"] > before


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["vssm", "rnn"])
def test_kept_halves_of_weights_follow_them(kind, replays):
    """With rows and widths for which products read split weights."""
    model = small_model(kind, width=512).to("cuda")
    rows = {"num": 16, "length": 28} if kind == "vssm" else {"num": 400, "length": 16}
    first = check(model, replays, **rows).x
    kept = dict(graphs._kept[model].recorder.weights._kept)
    assert kept
    for change in (
        lambda w: w.data.mul_(1.5),  # counts no version
        lambda w: w.data[3, 5].add_(1),
        lambda w: w.data[3, 5].sub_(1),
    ):
        before = dict(replays)
        for one in kept.values():
            change(one.weight)
        changed = generate(model, seed=2, **rows)
        assert (
            replays["recorded"] == before["recorded"] and replays["replayed"] > before["replayed"]
        )
        same_results(changed, generate(model, seed=2, graphs=False, **rows))
        assert relative_error(changed.x, first) > 1e-6
        first = changed.x
    check(model, replays, **{**rows, "num": rows["num"] + 1})
    assert dict(graphs._kept[model].recorder.weights._kept) == kept, "other recordings share them"
    halves = weakref.ref(next(iter(kept.values())))
    del kept, one
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0)
    generate(model, seed=2, **rows)
    gc.collect()
    assert halves() is None, "and they go with them"


def test_programs_are_bounded_and_the_oldest_goes(device, replays, monkeypatch):
    monkeypatch.setattr(graphs, "PROGRAMS", 2)
    model = small_model("vssm").to(device)
    for length in (3, 4, 5):
        check(model, replays, num=1, length=length)
    assert len(programs(model)) == 2
    check(model, replays, times=1, num=1, length=4)  # of the two kept, now the one used last
    check(model, replays, times=2, num=1, length=3)
    check(model, replays, times=1, num=1, length=4)
    with pytest.raises(AssertionError, match="not recorded again"):
        check(model, replays, times=1, num=1, length=5)


def test_keys_asked_for_once_are_bounded(device):
    model = small_model("vssm").to(device)
    for num in range(1, 80):
        generate(model, num=num, length=1)
    assert len(graphs._kept[model].asked) <= 64
    assert not programs(model)


def test_a_failed_recording_falls_back_with_one_warning(device, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("out of memory: tried 8 GiB\nand more lines")

    monkeypatch.setattr(Recorder, "record", fail)
    model = small_model("vssm").to(device)
    expected = generate(model, num=2, length=4, graphs=False).x
    generate(model, num=2, length=4)
    message = (
        r"^generating without a CUDA graph, which could not be made: out of memory: tried 8 GiB$"
    )
    with pytest.warns(UserWarning, match=message):
        same(generate(model, num=2, length=4).x, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(generate(model, num=2, length=4).x, expected)


@pytest.mark.parametrize("kind", ["vssm", "ssm"])
def test_threads_do_not_mix_their_results(kind, device):
    model = small_model(kind).to(device)
    expected = [generate(model, num=2, length=5, seed=seed, graphs=False).x for seed in range(4)]
    wrong = []

    def work(seed):
        for _ in range(5):
            x = generate(model, num=2, length=5, seed=seed).x
            if relative_error(x, expected[seed]) > TOLERANCE:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(programs(model)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_not_kept_alive(kind):
    """By recordings of a GPU; those of a CPU hold their function, which must not hold the model either."""
    graphs.DEVICES, devices = ("cpu",), graphs.DEVICES
    try:
        model = small_model(kind)
        for _ in range(3):
            generate(model, length=5, prompt=sequences(model, 1, 2))
            generate(model, length=5)
        assert programs(model)
    finally:
        graphs.DEVICES = devices
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_nothing_is_recorded_on_a_cpu_or_when_not_asked(replays, monkeypatch):
    model = small_model("vssm")
    for _ in range(3):
        generate(model, length=4)
    assert model not in graphs._kept and list(_empty_runs[model]) == [4]
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    for _ in range(3):
        generate(model, length=4, graphs=False)
        with torch.autocast("cpu", torch.bfloat16):
            generate(model, length=4)
    assert replays == {"recorded": 0, "replayed": 0}


def paths_forecaster(device, kind="vssm", width=16, **options):
    values = {
        "features": 4,
        "patch": 2,
        "mean": (5.0, -3.0),
        "std": (2.0, 0.5),
        "windowed": "window",
        **options,
    }
    meta = Meta(name="series", length=0, suggested_head="", columns=("a", "b"), **values)
    model = small_model(kind, "gaussian-learned", features=values["features"], width=width).to(
        device
    )
    return Forecaster(model, meta)


def plain_forecast(forecaster, *arguments, **options):
    """The same without recordings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "DEVICES", ())
        return forecaster.forecast(*arguments, **options).samples


def histories(num, seed=0):
    return torch.randn(
        num, 12, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


OTHERS = [
    {},
    {"separate": True, "features": 2},
    {"season": 3},
    {"windowed": None},
    {"windowed": None, "separate": True, "features": 2},
    {"cycles": ("day",), "features": 8},
]


@pytest.mark.parametrize("options", OTHERS, ids=str)
@pytest.mark.parametrize("kind", PARALLEL)
def test_replayed_paths_equal_plain(kind, options, device, replays):
    own, before = paths_forecaster(device, kind, **options), None
    for turn in range(4):
        times = np.arange(turn, turn + 12).astype("datetime64[h]")
        x, settings = (
            histories(3, seed=turn),
            {"seed": turn - 1, "temperature": 0.8, "times": times},
        )
        made = own.forecast(x, 9, 5, **settings).samples
        same(made, plain_forecast(own, x, 9, 5, **settings))
        assert before is None or not torch.equal(made, before), "other histories and seeds"
        before = made
    assert replays == {"recorded": 1, "replayed": 3}


@pytest.mark.parametrize("num", [7, 8])
def test_slabs_of_paths_replay_one_recording(num, device, replays, monkeypatch):
    """The last slab is as large as the others, also where it has to make some paths again."""
    own, x = paths_forecaster(device), histories(num)
    whole = plain_forecast(own, x, 6, 4)
    monkeypatch.setattr(sampling.paths, "_MOST_PATHS", dict.fromkeys(("cpu", "cuda"), 9))
    same(plain_forecast(own, x, 6, 4), whole)
    assert replays == {"recorded": 0, "replayed": 0}
    same(own.forecast(x, 6, 4).samples, whole)
    assert replays == {"recorded": 1, "replayed": 3}
    same(own.forecast(x, 6, 4).samples, whole)
    assert replays == {"recorded": 1, "replayed": 7}


def test_slabs_of_separate_columns_have_their_own_scale(device, replays, monkeypatch):
    own, x = paths_forecaster(device, separate=True, features=2, windowed=None), histories(5)
    whole = plain_forecast(own, x, 6, 4)
    monkeypatch.setattr(sampling.paths, "_MOST_PATHS", dict.fromkeys(("cpu", "cuda"), 12))
    for _ in range(2):
        same(own.forecast(x, 6, 4).samples, whole)
    assert replays == {"recorded": 1, "replayed": 7}


def test_what_is_equal_but_not_right_is_refused_again(device):
    own, x = paths_forecaster(device, horizon=6), histories(2)
    for horizon in (1, 1, 1, None, None):
        own.forecast(x, horizon, 1)
    for name, value in (("horizon", True), ("samples", True), ("horizon", 1.0), ("samples", 1.0)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            own.forecast(x, **{"horizon": 1, "samples": 1, name: value})
    for wrong in ({"seed": 2**63}, {"temperature": -1.0}, {"chunks": 2}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            own.forecast(x, 1, 1, **wrong)
    for _ in range(4):
        with pytest.warns(UserWarning, match="extrapolation"):
            own.forecast(x, 7, 1)
    dates = np.arange(12).astype("datetime64[h]")
    assert own.forecast(x, 1, 1, dates).times is not None
    same(own.forecast(x.clone().requires_grad_(), 1, 1).samples, plain_forecast(own, x, 1, 1))


def test_gaps_are_filled_in_forecasts_asked_for_again(device, replays):
    own, x = paths_forecaster(device, fill="zero"), histories(2)
    for _ in range(3):
        own.forecast(x, 6, 4)
    assert replays == {"recorded": 1, "replayed": 2}
    whole, x = x.clone(), x.clone()
    whole[1, 3, 0], x[1, 3, 0] = 0, torch.nan
    same(own.forecast(x, 6, 4).samples, plain_forecast(own, whole, 6, 4))
    assert replays == {"recorded": 1, "replayed": 3}, "what can not be read is not replayed"


def test_a_history_on_its_way_is_not_written_over(monkeypatch):
    """Until the device has read a history its memory stays as it is."""
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    own, x = paths_forecaster("cpu"), histories(2)
    for _ in range(2):
        own.forecast(x, 6, 4)
    (program,) = graphs._kept[own.model].programs.values()
    event = program._read = Mock(**{"query.return_value": True})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    own.forecast(x, 6, 4)
    event.record.assert_called_once_with("the stream")
    words = program._parcel.words.clone()
    event.query.return_value = False
    for factor in (2, 3):
        same(own.forecast(factor * x, 6, 4).samples, plain_forecast(own, factor * x, 6, 4))
    assert torch.equal(program._parcel.words, words)
    assert event.record.call_count == 1


def test_equal_scales_share_a_recording_and_others_do_not(device, replays):
    own, x = paths_forecaster(device), histories(2)
    for _ in range(2):
        own.forecast(x, 6, 4)
    again = Forecaster(own.model, replace(own.meta, columns=("c", "d")))
    same(again.forecast(x, 6, 4).samples, plain_forecast(own, x, 6, 4))
    assert replays == {"recorded": 1, "replayed": 2}
    for changed in ({"std": (9.0, 0.5)}, {"windowed": "last"}):
        other = Forecaster(own.model, replace(own.meta, **changed))
        same(other.forecast(x, 6, 4).samples, plain_forecast(other, x, 6, 4))
    assert replays == {"recorded": 1, "replayed": 2}


def test_replayed_histories_are_still_checked(device):
    options = {"windowed": None, "mean": (0.0, 0.0), "std": (1e-20, 1.0)}
    own, x = paths_forecaster(device, **options), histories(2) * 1e-20
    for _ in range(3):
        own.forecast(x, 6, 4)
    for value, message in (
        (1e25, "x contains NaN or infinite"),
        (1e31, "up to 1e\\+31"),
        (torch.nan, "missing"),
    ):
        x[1, 3, 0] = value
        with pytest.raises(ValueError, match=message):
            own.forecast(x, 6, 4)


def test_paths_stay_as_they_are_and_follow_the_weights(device, replays):
    own, x = paths_forecaster(device), histories(2)
    made = [own.forecast(x, 6, 4, seed=seed).samples for seed in (0, 1, 2)]
    copies = [paths.clone() for paths in made]
    with torch.no_grad():
        own.model.decoder.out.weight.mul_(1.5)
    changed = own.forecast(x, 6, 4, seed=2).samples
    same(changed, plain_forecast(own, x, 6, 4, seed=2))
    assert relative_error(changed, made[2]) > 1e-3
    own.model.decoder.out.weight.data.mul_(1.5)  # counts no version
    for _ in range(3):
        changed = own.forecast(x, 6, 4, seed=2).samples
        same(changed, plain_forecast(own, x, 6, 4, seed=2))
    assert all(torch.equal(paths, copy) for paths, copy in zip(made, copies, strict=True))


@pytest.mark.gpu
def test_paths_on_several_streams_follow_halves_of_weights():
    """With rows and widths for which products read split weights."""
    own, x = paths_forecaster("cuda", width=512), histories(100)
    for seed in range(3):
        own.forecast(x, 10, 4, seed=seed)
    kept = list(graphs._kept[own.model].recorder.weights._kept.values())
    assert kept
    for factor in (1.5, 0.5):
        for one in kept:
            one.weight.data.mul_(factor)  # counts no version
        same(own.forecast(x, 10, 4, seed=3).samples, plain_forecast(own, x, 10, 4, seed=3))


def test_a_recording_of_paths_does_not_keep_the_model(device):
    own = paths_forecaster(device)
    for seed in range(3):
        own.forecast(histories(2), 6, 4, seed=seed)
    gone = weakref.ref(own.model)
    del own
    gc.collect()
    assert gone() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_forecasts_on_a_gpu_are_those_of_a_cpu():
    """At a width that all kernels take, with slabs and replays."""
    torch.manual_seed(0)
    config = ModelConfig(
        kind="vssm", features=24, width=64, layers=2, latents=4, classes=16, head="gaussian-learned"
    )
    meta = Meta(
        name="series",
        length=0,
        suggested_head="",
        columns=("a",),
        features=24,
        patch=24,
        windowed="last",
    )
    x = torch.randn(30, 120, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = build(config)
    wanted = Forecaster(model, meta).forecast(x, 200, 60, seed=2).samples
    own = Forecaster(model.cuda(), meta)
    for numbers in (2**30, 2**18):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling.paths, "_MOST_NUMBERS", {"cuda": numbers})
            for _ in range(3):
                made = own.forecast(x, 200, 60, seed=2).samples.cpu()
        off = ((made - wanted).abs() / wanted.abs().amax()).amax((2, 3))
        # Noise within rounding of the edge between two classes gives another path.
        assert off.median() < 1e-5 and (off > 1e-4).float().mean() < 1e-2


@pytest.mark.gpu
def test_calls_with_other_seeds_need_not_wait_for_each_other():
    """A seed is read from memory of the host, which the next call writes to."""
    model = small_model("vssm").to("cuda")
    seeds = [3, -5, 2**62, 3, 7, 0, -(2**63), 11]
    wanted = [generate(model, num=3, length=8, seed=seed, graphs=False).x for seed in seeds]
    for _ in range(3):
        given = [generate(model, num=3, length=8, seed=seed).x for seed in seeds]
    for seed, one, other in zip(seeds, given, wanted, strict=True):
        assert torch.equal(one, other), seed


def test_a_number_of_the_host_changes_only_after_what_is_watched_was_seen():
    log = []
    shot = OneShot.__new__(OneShot)
    shot._told = {"seed": Mock(fill=lambda number: log.append(number))}
    shot.fixed, shot.static = {}, []
    watch = {
        "expect": lambda: log.append("expect"),
        "unchanged": lambda: not log.append("unchanged"),
    }
    shot.watch = Mock(**watch)
    shot.recording = Mock(replay=lambda model: log.append("replay"))
    shot(None, State({}), {"seed": 7}, 0)
    assert log == ["expect", 7, "replay", "unchanged"]


def test_a_model_that_is_moved_gives_back_what_is_kept(device):
    model = small_model("vssm").to(device)
    for _ in range(4):
        generate(model, num=2, length=LENGTH)
    kept, remembered = graphs._kept[model], _empty_runs[model]
    assert kept.programs and kept.held and kept.last and remembered
    model.to(device).float()
    assert kept.programs and kept.held and kept.last and remembered, "it was there already"
    model.to(torch.float64)
    assert not (kept.programs or kept.held or kept.last or remembered)
    made = [generate(model, num=2, length=LENGTH) for _ in range(4)]
    assert made[-1].x.dtype == torch.float64
    same_results(made[-1], generate(model, num=2, length=LENGTH, graphs=False))


def test_weights_that_a_recording_reads_are_held(device, replays):
    """It is started before anybody knows that the model has others."""
    model = small_model("vssm").to(device)
    generate(model, num=2, length=LENGTH)
    assert not graphs._kept[model].held, "nothing is recorded yet"
    for _ in range(4):
        generate(model, num=2, length=LENGTH)
    held = {tensor.data_ptr() for tensor in graphs._kept[model].held}
    assert held == {w.data_ptr() for name, w in model.named_parameters() if "encoder" not in name}
    for weight in model.parameters():
        weight.data = weight.data.clone()
    assert held == {tensor.data_ptr() for tensor in graphs._kept[model].held}
    replays["replayed"] = 0
    made = generate(model, num=2, length=LENGTH)
    assert replays["replayed"] == 1, "in vain, once"
    assert not graphs._kept[model].held
    same_results(made, generate(model, num=2, length=LENGTH, graphs=False))
