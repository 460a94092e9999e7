"""What an engine keeps: recorded programs and passes over empty tokens."""

import copy
import pickle
import threading
import warnings
import weakref

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
from vssm import Engine
from vssm.engine import engine as engine_module
from vssm.engine import programs
from vssm.engine.programs import Recorder

PARALLEL = ("tvae", "vssm")


def repeat(engine, times=3, **options):
    """Calls so often that the last call is replayed."""
    made = [engine.generate(**{"length": 5, "seed": seed, **options}) for seed in range(times)]
    return made[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_third_call_replays_and_records_nothing(kind, device, counts):
    model = small_model(kind).to(device)
    engine, seen = Engine(model), []
    for seed in range(5):
        engine.generate(num=2, length=5, seed=seed)
        seen.append((counts.recorded, counts.replayed))
    (first, second, third, fourth, fifth) = seen
    assert first == (0, 0), "most calls are made once"
    assert second[0] > 0
    assert third[0] == fourth[0] == fifth[0] == second[0]
    assert fifth[1] - fourth[1] == fourth[1] - third[1] == third[1] - second[1] > 0


BAD = [
    ({"length": 1.0}, "length is 1.0; it must be"),
    ({"length": True}, "length is True; it must be"),
    ({"length": "1"}, "length is '1'; it must be"),
    ({"length": [1]}, "length is .*; it must be"),
    ({"num": 1.0}, "num is 1.0; it must be"),
    ({"num": True}, "num is True; it must be"),
    ({"num": [1]}, "num is .*; it must be"),
    ({"num": "1"}, "num is '1'; it must be"),
    ({"passes": True}, "passes is True; it must be"),
    ({"chunk": 1.0}, "chunk is 1.0; it must be"),
    ({"temperature": "1"}, "temperature is '1'"),
    ({"recondition": 0}, "recondition is 0; it must be True or False"),
    ({"cache": 1}, "cache is 1; it must be True or False"),
    ({"observe": ["mean"]}, "observe=.* is unknown"),
    ({"seed": True}, "seed has type bool"),
    ({"seed": 1.0}, "seed has type float"),
    ({"seed": "1"}, "seed"),
    ({"seed": [0.5]}, "seed"),
    ({"seed": 2**63}, f"seed is {2**63}"),
    ({"seed": -(2**63) - 1}, f"seed is {-(2**63) - 1}"),
]


@pytest.mark.parametrize("kind", ["vssm", "ssm"])
def test_bad_arguments_are_refused_also_after_equal_good_ones(kind, device):
    model = small_model(kind).to(device)
    engine = Engine(model)
    for chunk in (None, 1) if kind == "vssm" else (None,):
        repeat(engine, num=1, length=1, chunk=chunk)
        repeat(engine, num=1, length=1, chunk=chunk, seed=1)
    for wrong, message in BAD:
        refused = []
        for generate in (engine.generate, lambda **options: vssm.generate(model, **options)):
            with pytest.raises(ValueError, match=rf"^{message}") as caught:
                generate(**{"num": 1, "length": 1, **wrong})
            refused.append(str(caught.value))
        assert refused[0] == refused[1]


@pytest.mark.parametrize("make", [torch.tensor, np.array, np.float64])
def test_a_temperature_of_another_type_is_read_at_every_call(make, device):
    model = small_model("vssm").to(device)
    engine, temperature = Engine(model), make(1.0)
    for value in 3 * (1.0, 0.01):
        if make is np.float64:
            temperature = make(value)
        else:
            temperature[...] = value
        made = engine.generate(num=2, length=5, temperature=temperature, seed=3)
        same_results(made, vssm.generate(model, num=2, length=5, temperature=value, seed=3))


@pytest.mark.parametrize("kind", KINDS)
def test_training_or_moving_the_model_does_not_change_an_engine(kind, device):
    model = small_model(kind).to(device)
    engine, options = Engine(model), {"num": 2, "length": 5, "seed": 2}
    before = repeat(engine, num=2)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    torch.optim.AdamW(model.parameters(), lr=0.3, fused=True).step()
    trained = vssm.generate(model, **options)
    assert relative_error(trained.x, before.x) > 1e-3
    same_results(engine.generate(**options), before)
    model.double()
    assert vssm.generate(model, **options).x.dtype == torch.float64
    same_results(engine.generate(**options), before)
    model.to("meta")
    same_results(engine.generate(**options), before)
    assert engine.device.type == device.type and engine.config == model.config


@pytest.mark.parametrize("kind", ["vssm", "ssm", "transformer"])
def test_two_engines_of_one_model_share_nothing(kind, device, counts):
    model = small_model(kind).to(device)
    first, second = Engine(model), Engine(model)
    repeat(first, num=2)
    recorded = counts.recorded
    repeat(second, num=2)
    assert counts.recorded == 2 * recorded
    owned = [memory(*engine.model.parameters()) for engine in (first, second)]
    assert not owned[0] & owned[1] and not owned[0] & memory(*model.parameters())
    with torch.no_grad():
        for weight in first.model.parameters():
            weight.zero_()
    same_results(repeat(second, num=2), vssm.generate(model, num=2, length=5, seed=2))


def memory(*tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


STARTS = [{"num": 3}, {"prompt": 2}, {"num": 2, "prompt": 1}, {"num": 1}]


def start(model, options, device):
    """Replaces a number of prompts by as many prompts."""
    rows = options.get("prompt")
    return options if rows is None else {**options, "prompt": sequences(model, rows, 3).to(device)}


@pytest.mark.parametrize("kind", KINDS)
def test_results_own_their_memory(kind, device):
    model = small_model(kind).to(device)
    for options in (start(model, options, device) for options in STARTS):
        engine = Engine(model)
        seen = memory(*engine.model.parameters())
        results = [engine.generate(length=6, seed=seed, **options) for seed in range(6)]
        for x, z, state in results:
            mine = memory(x) if z is None else memory(x, z)
            assert not mine & memory(*state.leaves()), "who keeps x does not keep the state"
            mine |= memory(*state.leaves())
            assert not mine & seen
            seen |= mine


@pytest.mark.parametrize("kind", KINDS)
def test_later_calls_do_not_change_results(kind, device):
    model = small_model(kind).to(device)
    for options in (start(model, options, device) for options in STARTS):
        engine = Engine(model)
        results = [engine.generate(length=6, seed=seed, **options) for seed in range(4)]
        copies = [(made.x.clone(), made.state.map(torch.clone)) for made in results]
        for seed in range(4, 6):
            engine.generate(length=6, seed=seed, **options)
        for made, (x, state) in zip(results, copies, strict=True):
            assert torch.equal(made.x, x)
            same_states(made.state, state, tolerance=1e-12)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_results_can_be_written_to(kind, recorded, device, monkeypatch):
    if not recorded:
        monkeypatch.setattr(programs, "DEVICES", ())
    model = small_model(kind).to(device)
    engine, wanted = Engine(model), vssm.generate(model, num=1, length=5, seed=1)
    for _ in range(5):
        made = engine.generate(num=1, length=5, seed=1)
        same_results(made, wanted)
        for tensor in (made.x, *([] if made.z is None else [made.z]), *made.state.leaves()):
            tensor.zero_()


def test_programs_are_bounded_and_the_oldest_goes(device, counts, monkeypatch):
    monkeypatch.setattr(programs, "_PROGRAMS", 2)
    engine = Engine(small_model("vssm").to(device))
    for length in (3, 4, 5):
        repeat(engine, length=length)
    assert counts.recorded == 3
    repeat(engine, length=4)  # is kept, and now the last one used
    assert counts.recorded == 3
    repeat(engine, length=3)  # went first, and takes the place of 5
    repeat(engine, length=4)
    assert counts.recorded == 4
    repeat(engine, length=5)
    assert counts.recorded == 5


def test_keys_asked_for_once_are_bounded(device, counts, monkeypatch):
    monkeypatch.setattr(programs, "_KEYS", 4)
    engine = Engine(small_model("vssm").to(device))
    for num in (1, 2, 3, 4, 5, 1):
        engine.generate(num=num, length=1)
    assert counts.recorded == 0, "1 was forgotten when 5 came"
    engine.generate(num=5, length=1)
    assert counts.recorded == 1


@pytest.mark.parametrize("kind", ["vssm", "ssm"])
def test_a_failed_recording_falls_back_with_one_warning(kind, device, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("out of memory: tried 8 GiB\nand more lines")

    model = small_model(kind).to(device)
    wanted = vssm.generate(model, num=2, length=4)
    monkeypatch.setattr(Recorder, "record", fail)
    engine = Engine(model)
    engine.generate(num=2, length=4)
    message = r"^could not record a CUDA graph, .*: out of memory: tried 8 GiB$"
    with pytest.warns(UserWarning, match=message):
        same_results(engine.generate(num=2, length=4), wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            same_results(engine.generate(num=2, length=4), wanted)


def test_an_error_of_a_call_is_raised_while_it_is_recorded(device):
    """A state that has run over empty tokens cannot be reconditioned."""
    engine = Engine(small_model("vssm").to(device))
    state = engine.generate(num=2, length=4).state
    for _ in range(3):
        with pytest.raises(ValueError, match="recondition=True cannot start from this state"):
            engine.generate(length=4, state=state, recondition=True)
    assert engine.generate(length=4, state=state).x.shape == (2, 4, 3)


@pytest.mark.parametrize("kind", ["vssm", "ssm", "transformer"])
def test_threads_do_not_mix_results(kind, device, counts):
    model = small_model(kind).to(device)
    engine = Engine(model)
    wanted = [vssm.generate(model, num=2, length=5, seed=seed).x for seed in range(4)]
    wrong = []

    def work(seed):
        for _ in range(6):
            if relative_error(engine.generate(num=2, length=5, seed=seed).x, wanted[seed]) > 1e-5:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert counts.recorded == (1 if kind == "vssm" else 2), "a program, or blocks of 4 and 1 steps"


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_is_dropped_is_freed(kind, recorded, device, monkeypatch):
    """At once: nothing waits for the garbage collector."""
    if not recorded:
        monkeypatch.setattr(programs, "DEVICES", ())
    model = small_model(kind).to(device)
    engine = Engine(model)
    repeat(engine, num=2)
    repeat(engine, prompt=sequences(model, 2, 3).to(device))
    gone = [weakref.ref(engine), weakref.ref(engine.model)]
    gone += [weakref.ref(weight) for weight in engine.model.parameters()]
    del engine
    assert [ref() for ref in gone] == [None] * len(gone)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda engine: pickle.loads(pickle.dumps(engine))])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_an_engine_records_anew(kind, make, device, counts):
    engine = Engine(small_model(kind).to(device))
    wanted, recorded = repeat(engine, num=2), counts.recorded
    other = make(engine)
    same_results(repeat(other, num=2), wanted)
    assert counts.recorded == 2 * recorded
    owned = [memory(*each.model.parameters()) for each in (engine, other)]
    assert not owned[0] & owned[1]


def test_nothing_is_recorded_on_a_cpu(counts):
    for kind in KINDS:
        engine = Engine(small_model(kind))
        repeat(engine, num=2, length=70)
        repeat(engine, num=2)
    assert (counts.recorded, counts.replayed) == (0, 0)


@pytest.mark.parametrize("kind", PARALLEL)
def test_the_pass_over_empty_tokens_is_made_once_for_each_length(kind, monkeypatch):
    model = small_model(kind)
    engine, passes = Engine(model), []
    run = engine.model.partial_posterior

    def counting(x=None, empty=0, state=None):
        passes.append(empty)
        return run(x, empty=empty, state=state)

    monkeypatch.setattr(engine.model, "partial_posterior", counting)
    for num, length in ((5, 7), (9, 7), (5, 4), (5, 7)):
        made = engine.generate(num=num, length=length, seed=1)
        same_results(made, vssm.generate(model, num=num, length=length, seed=1))
    assert passes == [7, 4]
    with torch.autocast("cpu", torch.bfloat16):  # has a precision of its own
        engine.generate(num=5, length=7)
    assert passes == [7, 4, 7]


def test_passes_over_empty_tokens_are_kept_up_to_some_bytes(device, monkeypatch):
    model = small_model("vssm", width=8, layers=1).to(device)
    step = model.config.latents * model.config.classes * 4
    monkeypatch.setattr(engine_module, "_EMPTY_BYTES", 10 * step)
    engine, passes = Engine(model), []
    run = engine.model.partial_posterior

    def counting(x=None, empty=0, state=None):
        passes.append(empty)
        return run(x, empty=empty, state=state)

    monkeypatch.setattr(engine.model, "partial_posterior", counting)
    for length in 2 * (4, 5, 6, 6):
        made = engine.generate(length=length, seed=1)
        same_results(made, vssm.generate(model, length=length, seed=1))
    assert passes == [4, 5, 6, 4, 5], "4 and 5 fit together, and 6 alone; its recording keeps it"
    engine.generate(length=11)
    engine.generate(length=11)
    assert passes[6:].count(11) >= 2, "a pass that is too large is not kept"


@pytest.mark.parametrize("kind", ["ssm", "transformer", "vrnn"])
def test_a_prompt_is_read_once(kind, device):
    model = small_model(kind).to(device)
    engine, prompt, lengths = Engine(model), sequences(model, 2, 30).to(device), []
    stack = engine.model.stack
    stack.blocks[0].register_forward_hook(lambda _, given, made: lengths.append(given[0].shape[1]))
    engine.generate(prompt=prompt, length=3)
    assert sum(lengths) == 33


@pytest.mark.gpu
def test_calls_with_other_seeds_need_not_wait_for_each_other():
    model = small_model("vssm").to("cuda")
    engine = Engine(model)
    seeds = [3, -5, 2**62, 3, 7, 0, -(2**63), 11]
    wanted = [vssm.generate(model, num=3, length=8, seed=seed).x for seed in seeds]
    for _ in range(3):
        made = [engine.generate(num=3, length=8, seed=seed).x for seed in seeds]
    for one, other in zip(made, wanted, strict=True):
        same(one, other)


@pytest.mark.gpu
def test_calls_on_several_streams_do_not_mix_results():
    model = small_model("vssm").to("cuda")
    engine = Engine(model)
    wanted = [vssm.generate(model, num=3, length=8, seed=seed).x for seed in range(12)]
    repeat(engine, num=3, length=8)
    streams, made = [torch.cuda.Stream() for _ in range(3)], []
    torch.cuda.synchronize()
    for seed in range(12):
        with torch.cuda.stream(streams[seed % 3]):
            made.append(engine.generate(num=3, length=8, seed=seed).x)
    torch.cuda.synchronize()
    for one, other in zip(made, wanted, strict=True):
        same(one, other)


def test_slabs_of_a_transformer_replay_their_loops(device, counts, monkeypatch):
    """The keys and values of many rows may not fit; the steps of each slab are recorded then."""
    monkeypatch.setattr(
        "vssm.sampling.request.rows_of_cache", lambda model, num, steps: min(num, 2)
    )
    model = small_model("transformer").to(device)
    engine, prompts = Engine(model), sequences(model, 5, 4).to(device)
    for options in ({"num": 5, "length": 70}, {"prompt": prompts, "length": 6}):
        for seed in range(3):
            before = counts.replayed
            made = engine.generate(seed=seed, **options)
            same_results(made, vssm.generate(model, seed=seed, **options))
        assert counts.replayed - before >= 3, "a loop for each slab"


def test_prompts_that_are_read_in_slabs_are_not_recorded(device, counts, monkeypatch):
    model = small_model("ssm").to(device)
    engine, prompts = Engine(model), sequences(model, 4, 6).to(device)
    monkeypatch.setattr("vssm.sampling.request.bytes_of_slab", lambda device: 6 * 2)
    monkeypatch.setattr("vssm.sampling.request.bytes_of_step", lambda *arguments: 1)
    for seed in range(3):
        made = engine.generate(prompt=prompts, length=1, seed=seed)
        same_results(made, vssm.generate(model, prompt=prompts, length=1, seed=seed))
    assert counts.recorded == 1, "the loop alone"
