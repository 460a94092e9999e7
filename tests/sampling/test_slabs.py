"""Large calls are made in pieces of time and of rows: the same results in less memory."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.conftest import KINDS, same_results, same_states, sequences, small_model
from vssm import generate, observe
from vssm.models import first_weight
from vssm.sampling import request
from vssm.sampling.request import Options

PARALLEL = ("tvae", "vssm")
STEP = 10**6  # bytes


@pytest.fixture
def slab(monkeypatch):
    """Sets how many steps, of all rows together, a slab may have."""

    def allow(steps):
        monkeypatch.setattr(request, "bytes_of_slab", lambda device: int((steps + 0.5) * STEP))
        monkeypatch.setattr(request, "bytes_of_step", lambda *arguments: STEP)

    return allow


def watch(model):
    """Returns a list that gets the rows and steps of the input of every block that runs."""
    seen = []
    for name, module in model.named_modules():
        if name.endswith("block") or name.rpartition(".")[0].endswith("blocks"):
            module.register_forward_hook(lambda _, given, made: seen.append(given[0].shape[:2]))
    return seen


def divided(seen, num):
    """Says whether never all rows were made at once, and forgets what was seen."""
    most = max(rows for rows, _ in seen)
    seen.clear()
    return most < num


@pytest.mark.parametrize(
    "options",
    [*({"kind": kind} for kind in KINDS), {"kind": "vssm", "levels": 2, "latents": 4}],
    ids=str,
)
def test_slabs_of_rows_equal_all_rows_at_once(options, slab):
    model = small_model(**options)
    kind, parallel = options["kind"], options["kind"] in PARALLEL
    prompts, seeds = sequences(model, 5, 4), torch.arange(5) + 7
    state = observe(model, prompts[:, :2], seed=3)
    starts = [{"num": 5}, {"num": 5, "prompt": prompts[:1]}, {"prompt": prompts, "seed": seeds}]
    starts += [{"state": state}, {"state": state, "prompt": prompts}]
    if parallel:
        starts += [{"num": 5, "chunk": 3, "recondition": True}]
        starts += [{"prompt": prompts, "length": 0, "chunk": 8}]
    wholes = [generate(model, **{"length": 6} | start) for start in starts]
    rests = [generate(model, length=3, state=whole.state) for whole in wholes]
    seen = watch(model)
    slab(2 * 6)  # two rows of six steps
    for start, whole, rest in zip(starts, wholes, rests, strict=True):
        made = generate(model, **{"length": 6} | start)
        same_results(made, whole)
        if parallel:
            assert divided(seen, 5)
        same_results(generate(model, length=3, state=made.state), rest)
    slab(1)
    seen.clear()
    same_states(observe(model, prompts[:, :2], seed=3), state)
    assert divided(seen, 5) == (kind not in ("rnn", "vrnn"))


def test_long_sequences_are_made_in_chunks_that_fit(slab, monkeypatch):
    model = small_model("vssm")
    prompts = sequences(model, 2, 3)
    # Seven steps fit, of which a prompt takes three.
    cases = [
        ({"num": 2}, [7, 4]),
        ({"prompt": prompts}, [7, 4, 3]),
        ({"state": observe(model, prompts)}, [7, 4]),
        ({"num": 2, "chunk": 8}, [7, 4]),
        ({"num": 2, "chunk": 4}, [4, 4, 3]),
        ({"prompt": prompts, "length": 0, "chunk": 9}, [3]),
    ]
    wholes = [generate(model, **{"length": 11} | start) for start, _ in cases]
    monkeypatch.setattr(request, "SHORTEST", 2)
    slab(2 * 7)
    seen = []
    model.decoder.register_forward_hook(lambda _, given, made: seen.append(given[0].shape[:2]))
    for (start, chunks), whole in zip(cases, wholes, strict=True):
        seen.clear()
        same_results(generate(model, **{"length": 11} | start), whole)
        assert seen == [(2, steps) for steps in chunks]


@pytest.mark.parametrize("room", [1, 200, 256, 300, 1000])
def test_chunks_are_not_short(room, slab):
    """If the chunks that fit had fewer than 256 steps, rows are divided instead."""
    slab(4 * room)
    model = small_model("vssm")
    for length in (1, 255, 256, 257, 300, 511, 512, 513, 1000, 1024, 4095):
        for chunk in (length, 100, 290):
            options = Options(length, chunk, False, 1, 1.0, False)
            fits = request.divide(model, torch.zeros(4, 0, 3), None, 4, options)[0].chunk
            assert fits == min(chunk, max(room, 256))


def test_logits_of_the_one_row_that_serves_all_rows_count():
    model = small_model("vssm", latents=32, classes=32)
    options = Options(10**6, 10**6, False, 1, 1.0, False)
    step, logits = request.bytes_of_step(model, first_weight(model), False), 3 * 32 * 32 * 4
    for num in (1, 1000):
        chunk = request.divide(model, None, None, num, options)[0].chunk
        assert chunk * (num * step + logits) <= 2**32 < 1.5 * chunk * (num * step + logits)


def test_only_a_vssm_makes_chunks_of_its_own(slab, monkeypatch):
    model = small_model("tvae")
    whole = generate(model, num=4, length=9)
    monkeypatch.setattr(request, "SHORTEST", 2)
    slab(4 * 5)
    seen = watch(model)
    same_results(generate(model, num=4, length=9), whole)
    assert {steps for _, steps in seen} == {9} and divided(seen, 4)


@pytest.mark.parametrize(
    "options", [{"recondition": True}, {"passes": 2}, {"recondition": True, "chunk": 4}]
)
def test_chunks_that_mean_something_stay(options, slab, monkeypatch):
    model = small_model("vssm")
    whole = generate(model, num=2, length=9, **options)
    monkeypatch.setattr(request, "SHORTEST", 2)
    slab(3)
    same_results(generate(model, num=2, length=9, **options), whole)


@pytest.mark.parametrize("kind", PARALLEL)
def test_slabs_share_what_all_rows_share(kind, slab):
    """If there is room for one row, two are made: single rows would not share their state."""
    model = small_model(kind)
    starts = [{"num": 5}, {"num": 5, "prompt": sequences(model, 1, 3)}]
    wholes = [generate(model, length=5, **start) for start in starts]
    seen = watch(model)
    for start, whole, steps in zip(starts, wholes, (5, 8), strict=True):
        slab(2 * steps)
        made = generate(model, length=5, **start)
        assert divided(seen, 5)
        same_results(made, whole)
        assert all(tensor.stride(0) == 0 for tensor in made.state.child("blind").leaves())
        assert all(tensor.stride(0) > 0 for tensor in made.state.child("decoder").leaves())


def test_a_transformer_whose_cache_would_not_fit_is_divided(monkeypatch):
    model = small_model("transformer")
    prompts, seeds = sequences(model, 5, 4), torch.arange(5) + 7
    state = observe(model, prompts[:, :2], seed=3)
    starts = [{"num": 5}, {"prompt": prompts, "seed": seeds}, {"state": state}]
    starts += [{"prompt": prompts, "length": 0}]
    wholes = [generate(model, **{"length": 6} | start) for start in starts]
    rests = [generate(model, length=3, state=whole.state) for whole in wholes]
    monkeypatch.setattr("vssm.sampling.request.rows_of_cache", lambda model, num, steps: 2)
    seen = watch(model)
    for start, whole, rest in zip(starts, wholes, rests, strict=True):
        made = generate(model, **{"length": 6} | start)
        assert divided(seen, 5)
        same_results(made, whole)
        same_results(generate(model, length=3, state=made.state), rest)


def test_rows_of_a_cache(monkeypatch):
    model = small_model("transformer")
    row = 2 * 16 * 2 * 4  # keys and values of a step: width, layers, bytes
    assert request.rows_of_cache(model, 10**9, 10**9) == 10**9, "a CPU is not divided"
    monkeypatch.setattr(request, "bytes_of_device", lambda device: 10 * 100 * row)
    assert request.rows_of_cache(model, 2, 100) == 2  # 750 of 900
    # The state of 3 leaves room for one more with its copies, 600 of 375; that of 6 none for 375.
    assert [request.rows_of_cache(model, num, 100) for num in (3, 5, 6)] == [1, 1, 6]
    assert request.rows_of_cache(model, 30, 10) == 15  # as equal as can be, of 16
    assert request.rows_of_cache(small_model("ssm"), 100, 100) == 100


def test_rows_of_a_slab(slab):
    model = small_model("ssm")
    slab(12)
    steps = 0, 1, 2, 3, 4, 6, 12, 13
    assert [request.rows_of_slab(model, 5, n, False) for n in steps] == [5, 5, 5, 3, 3, 2, 1, 1]


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


def state_bytes(state):
    return sum(tensor.nbytes for tensor in state.leaves())


@pytest.mark.parametrize("kind", ["transformer", "ssm", "tvae", "vssm"])
def test_slabs_take_less_memory_than_one_pass(kind, slab):
    """States are views of the results of a pass, which a slab must not keep."""
    model = small_model(kind, layers=4)
    x = sequences(model, 16, 64)
    most = []
    for rows in (16, 1):
        slab(rows * 64)
        with Live() as live:
            state = observe(model, x)
        most.append(live.most)
    assert most[1] - state_bytes(state) < (most[0] - state_bytes(state)) / 3


@pytest.mark.parametrize("layers", [1, 12])
@pytest.mark.parametrize(
    ("kind", "start"),
    [(kind, start) for kind in PARALLEL for start in ("nothing", "prompt", "read")]
    + [("transformer", "read"), ("ssm", "read")],
)
def test_a_slab_takes_the_memory_that_is_expected(kind, start, layers):
    sizes = {"features": 8, "width": 64, "latents": 8, "classes": 8}
    model = small_model(kind, layers=layers, **sizes)
    x, num, steps = sequences(model, 12, 96), 12, 96
    live = Live()
    live.seen |= {weight.untyped_storage()._cdata for weight in model.parameters()}
    with live:
        if start == "read":
            observe(model, x)
        elif start == "prompt":
            generate(model, prompt=x, length=96)
            steps = 2 * 96
        else:
            generate(model, num=num, length=96)
    reads = kind in PARALLEL and start != "nothing"
    expected = num * steps * request.bytes_of_step(model, first_weight(model), reads)
    assert 0.6 < live.most / expected < 1.25


@pytest.mark.gpu
def test_memory_does_not_grow_with_the_number_of_sequences(monkeypatch):
    monkeypatch.setattr(request, "bytes_of_slab", lambda device: 2**30)
    model = small_model("vssm", width=256, layers=2).to("cuda")
    peaks = []
    for num in (64, 1024):  # at once, and in chunks of time
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = generate(model, num=num, length=1024)
        own = made.x.nbytes + made.z.nbytes + state_bytes(made.state)
        peaks.append(torch.cuda.max_memory_allocated() - before - own)
    assert peaks[1] < 2 * 2**30 and peaks[1] < 4 * peaks[0]
