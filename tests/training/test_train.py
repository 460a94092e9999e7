"""Training: one loop for all models, equal to the last bit however often it is stopped."""

import itertools
import json
import math
import shutil
import signal
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import vssm
from tests.conftest import KINDS, small_config, small_model
from tests.tiny_runs import DATA, SignalAt, StopAt, log, newest, result, run, stopped, tiny
from vssm.config import PRESETS, ModelConfig, RunConfig, TrainConfig
from vssm.data import DataConfig, SeriesConfig, SyntheticConfig, draw, open_data
from vssm.evaluation.result import validations
from vssm.objectives import Terms, objective
from vssm.runs.folder import RunFolder
from vssm.training.distributed import World
from vssm.training.loop import Trainer, TrainingStopped
from vssm.training.progress import Bar, Lines, Progress
from vssm.training.setup import resolve
from vssm.training.step import Learner, Step, Tally, learning_rate, parameter_groups


def test_overfits_eight_sequences(tmp_path):
    """The first step cannot be known; the others come within 0.15 nats a value of certainty."""
    data = DataConfig(
        name="synthetic", synthetic=SyntheticConfig(length=4, features=2, num=10)
    )  # 9 and 1
    config = tiny(
        data=data, batch=8, epochs=200, learning_rate=3e-2, checkpoint_minutes=9, validate_every=200
    )
    config = replace(config, model=small_config("rnn", width=16, layers=1, sigma=0.1))
    folder = run(config, tmp_path / "run")
    x = open_data(data).train.batch(slice(0, 8))
    nats = (
        vssm.log_likelihood(vssm.load(folder), x, prompt_length=1).mean().item() / 6
    )  # three steps of two
    most = -math.log(0.1) - math.log(2 * math.pi) / 2
    assert most - 0.15 < nats < most


@pytest.mark.parametrize("kind", KINDS)
def test_every_model_trains_and_its_folder_loads(kind, tmp_path):
    folder = run(tiny(kind, epochs=2, checkpoint_minutes=9), tmp_path / "run")
    lines = log(folder)
    assert [(line["step"], line["split"]) for line in lines] == [
        *[(step, "train") for step in (1, 2, 3)],
        (3, "valid"),
        *[(step, "train") for step in (4, 5, 6)],
        (6, "valid"),
    ]
    model = vssm.load(folder)
    data = open_data(DATA)
    best = [line["loss"] for line in lines if line.get("best")][-1]
    assert best == min(line["loss"] for line in log(folder, "valid"))
    if kind in ("rnn", "ssm", "transformer"):  # the others need the noise of the validation
        assert objective(model, data.valid.batch(slice(0, 4))).loss.mean().item() == pytest.approx(
            best, rel=1e-5
        )
    assert lines[-2]["loss"] < lines[0]["loss"]
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["parameters"] == sum(p.numel() for p in model.parameters())
    assert (meta["backend"], meta["ended"] is None) == (
        "numba" if kind in ("ssm", "vssm") else None,
        False,
    )
    assert json.loads((folder / "config.json").read_text())["data_meta"] == json.loads(
        json.dumps(data.meta.to_json())
    )


def test_one_seed_gives_one_log(tmp_path):
    first, second = (run(tiny("tvae", epochs=2), tmp_path / name) for name in ("first", "second"))
    assert result(first) == result(second)
    other = run(tiny("tvae", epochs=2, seed=1), tmp_path / "other")
    assert log(other)[0]["loss"] != log(first)[0]["loss"]


@pytest.mark.parametrize(
    ("kind", "options"), [("rnn", {"log_every": 2}), ("tvae", {"ema": 0.8}), ("ssm", {})]
)
def test_stop_and_resume_equals_unbroken(kind, options, tmp_path):
    config = tiny(kind, **options)
    whole = run(config, tmp_path / "whole")
    folder = stopped(config, tmp_path / "parts", 5)
    shown = StopAt(8)
    with pytest.raises(KeyboardInterrupt):
        run(None, folder, resume=True, progress=shown)
    assert shown.messages == [f"resuming {str(folder)!r} at step 4 of 12"]
    assert result(run(config, folder, resume=True)) == result(whole)
    before = result(folder)
    assert result(run(None, folder, resume=True)) == before  # a run that has ended stays as it is


def test_a_run_starts_from_the_weights_of_another(tmp_path):
    first = run(tiny("ssm", max_steps=6), tmp_path / "first")
    plain = replace(tiny("ssm", max_steps=4, learning_rate=1e-9), model=RunConfig().model)
    onward = replace(plain, train=replace(plain.train, init=str(first)))
    again = run(onward, tmp_path / "again")
    assert vssm.load(again).config == vssm.load(first).config  # which were not given again
    moved = vssm.load(again).state_dict()
    for name, tensor in vssm.load(first).state_dict().items():
        torch.testing.assert_close(moved[name], tensor, rtol=0, atol=1e-6)
    stopped(onward, tmp_path / "stopped", 2)
    shutil.rmtree(first)  # a checkpoint has all that is needed
    run(None, tmp_path / "stopped", resume=True)
    resumed = vssm.load(tmp_path / "stopped").state_dict()
    assert all(torch.equal(resumed[name], moved[name]) for name in moved)


def test_a_start_that_does_not_fit_is_refused(tmp_path):
    first = str(run(tiny("ssm", max_steps=2), tmp_path / "first"))

    def refused(message, config):
        with pytest.raises(ValueError, match=message):
            run(config, tmp_path / "second")
        assert not (tmp_path / "second").exists()

    config = tiny("ssm", max_steps=2)
    digits = replace(
        config,
        train=replace(config.train, init=first),
        model=RunConfig().model,
        data=DataConfig(name="digits"),
    )
    refused(r"has 3 features and 256 bins, but data set 'digits' has 8 and 256; use", digits)
    lost = replace(config, train=replace(config.train, init=str(tmp_path / "nowhere")))
    refused(r"nowhere' does not exist; use a run folder", lost)
    with pytest.raises(ValueError, match="init is ''; use a folder or a shipped model"):
        TrainConfig(init="")


def test_average_of_the_weights_is_what_is_kept(tmp_path):
    config = tiny(ema=0.9, epochs=1)
    folder = run(config, tmp_path / "run")
    kept, saved = load_file(folder / "weights.safetensors"), newest(folder)
    average, last = load_file(saved / "ema.safetensors"), load_file(saved / "weights.safetensors")
    assert all(torch.equal(kept[name], average[name]) for name in kept)
    assert not any(torch.equal(last[name], average[name]) for name in kept)


def test_only_matrices_decay():
    for kind in ("vssm", "tvae", "vrnn"):
        model = small_model(kind)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        decayed, kept = (
            [names[id(p)] for p in group["params"]] for group in parameter_groups(model)
        )
        assert sorted([*decayed, *kept]) == sorted(names.values())
        last = {name.split(".")[-1] for name in kept}
        assert last <= {"bias", "blank", "A_log", "D", "weight", "bias_ih_l0", "bias_hh_l0"}
        assert all("norm" in name or "ln_" in name for name in kept if name.endswith("weight"))
        assert not any(
            "norm" in name or "ln_" in name or name.endswith(("bias", "A_log")) for name in decayed
        )
        assert parameter_groups(model)[1]["weight_decay"] == 0


def test_decay_reaches_matrices_alone(tmp_path, monkeypatch):
    """With terms that are constants only the decay is left."""

    def constant(model, x, *_):
        zero = sum((parameter * 0).sum() for parameter in model.parameters()).expand(len(x))
        return Terms(zero, zero, zero, zero)

    monkeypatch.setattr("vssm.training.step.objective", constant)
    still, smaller = (
        run(tiny("ssm", max_steps=1, warmup=0.0, weight_decay=decay), tmp_path / str(decay))
        for decay in (0.0, 0.5)
    )
    before, after = (
        load_file(newest(folder) / "weights.safetensors") for folder in (still, smaller)
    )
    decayed = {name for name in before if not torch.equal(before[name], after[name])}
    assert decayed == {
        name for name in before if before[name].ndim > 1 and not name.endswith("A_log")
    }
    for name in decayed:
        assert torch.allclose(after[name], before[name] * (1 - 1e-2 * 0.5), rtol=1e-6)


def test_learning_rate_warms_up_and_falls():
    config = TrainConfig(learning_rate=2.0, warmup=0.1)
    rates = [learning_rate(config, step, 100) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))
    assert 0 < rates[-1] < 2e-3
    assert learning_rate(replace(config, warmup=0.0), 1, 100) == 2.0


@pytest.mark.parametrize("kind", ["rnn", "tvae", "vssm"])
def test_bfloat16_on_a_cpu_follows_float32(kind, tmp_path):
    half, full = (
        log(run(tiny(kind, epochs=1, precision=precision), tmp_path / precision), "train")
        for precision in ("bfloat16", "float32")
    )
    assert half[-1]["loss"] != full[-1]["loss"]
    assert half[-1]["loss"] == pytest.approx(full[-1]["loss"], rel=0.05)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_never_wait_for_the_device(kind, optimizer, tmp_path, monkeypatch):
    take = Step.take

    def strict(steps, step):
        torch.cuda.set_sync_debug_mode(
            "error" if step > 2 else "default"
        )  # kernels compile at first
        try:
            take(steps, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Step, "take", strict)
    config = tiny(kind, ema=0.9, device="cuda", optimizer=optimizer)
    lines = log(run(config, tmp_path / "run"), "train")
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_step_is_the_step(kind, tmp_path):
    options = {"ema": 0.9, "device": "cuda", "precision": "float32", "validate_partial": True}
    told = StopAt(99)
    plain, replayed = (
        log(run(tiny(kind, graph=graph, **options), tmp_path / str(graph), progress=told))
        for graph in (False, True)
    )
    assert told.messages == [], "a step that could not be recorded runs plainly, and says so"
    assert len(plain) == len(replayed) > 3 and "partial_elbo" in plain[-1]
    for one, other in zip(plain, replayed, strict=True):
        assert other == pytest.approx(one, rel=1e-4)


def test_head_features_and_bins_come_from_the_data(tmp_path):
    digits = open_data(DataConfig(name="digits")).meta
    assert resolve(RunConfig(), digits).model == ModelConfig(features=8, head="gaussian")
    mixture = RunConfig(model=ModelConfig(features=1, head="logistic-mixture"))
    assert resolve(mixture, digits).model.bins == 17
    assert (
        resolve(RunConfig(), replace(digits, suggested_head="bernoulli")).model.head == "bernoulli"
    )
    with pytest.raises(
        ValueError, match="head='categorical' does not suit data set 'digits'; use 'auto'"
    ):
        resolve(RunConfig(model=ModelConfig(features=1, head="categorical")), digits)
    with pytest.raises(ValueError, match="head='logistic-mixture' needs values at equally"):
        resolve(mixture, open_data(DATA).meta)


def test_noise_of_a_shard_is_that_of_the_whole():
    for kind in ("tvae", "vrnn"):
        model, x = small_model(kind), torch.rand(6, 4, 3)
        whole = objective(model, x, torch.Generator().manual_seed(3))
        parts = [
            objective(model, x[2 * i : 2 * i + 2], torch.Generator().manual_seed(3), shard=(i, 3))
            for i in range(3)
        ]
        for term, pieces in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.allclose(term, torch.cat(pieces), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"shard is \(2, 2\); it must be"):
        objective(model, x, shard=(2, 2))


def test_the_first_of_many_processes_alone_notes_what_is_odd_about_the_data(tmp_path):
    days = [f"2020-01-{day:02}" for day in range(1, 31) if day != 9]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["date,a", *(f"{day},{k}" for k, day in enumerate(days))]))
    data = DataConfig(name="series", series=SeriesConfig(path=str(path), context=2, horizon=1))
    said = []
    for rank in range(2):
        world, folder = World(torch.device("cpu"), rank, size=2), RunFolder(tmp_path / "run")
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            Trainer(tiny(data=data), folder, world, Progress(), resume=False)
        folder.close()
        said.append(len([note for note in notes if "dates are uneven" in str(note.message)]))
    assert said == [1, 0]


def poison(monkeypatch, steps, term="reconstruction"):
    """Makes a term NaN or infinite at some training steps, counted from 1."""
    taken = 0

    def poisoned(model, x, *rest):
        nonlocal taken
        terms = objective(model, x, *rest)
        taken += torch.is_grad_enabled()
        if not torch.is_grad_enabled() or taken not in steps:
            return terms
        if term == "gradient_norm":  # finite terms, infinite slope
            bad = {"loss": terms.loss + (terms.loss - terms.loss.detach()).sqrt()}
        else:
            bad = {"loss": terms.loss * math.nan, term: terms.loss * math.nan}
        return terms._replace(**bad)

    monkeypatch.setattr("vssm.training.step.objective", poisoned)


@pytest.mark.parametrize("term", ["reconstruction", "gradient_norm"])
def test_steps_that_are_not_finite_change_nothing_and_are_counted(term, tmp_path, monkeypatch):
    poison(monkeypatch, {1, 4, 5}, term)
    folder = run(tiny(ema=0.5), tmp_path / "run")
    lines = log(folder, "train")
    assert [line["skipped"] for line in lines] == [1, 1, 1, 2, 3, *[3] * 7]
    assert [line["loss"] is None for line in lines] == [i in (0, 3, 4) for i in range(12)]
    state = load_file(newest(folder) / "optimizer.safetensors")
    assert {float(value) for name, value in state.items() if name.endswith(".step")} == {9.0}
    assert all(
        tensor.isfinite().all() for tensor in load_file(folder / "weights.safetensors").values()
    )


@pytest.mark.parametrize(
    ("term", "log_every"), [("reconstruction", 1), ("kl", 50), ("gradient_norm", 50)]
)
def test_ten_in_a_row_stop_the_run(term, log_every, tmp_path, monkeypatch):
    poison(monkeypatch, set(range(4, 100)), term)
    config = tiny("tvae", epochs=8, log_every=log_every)
    reason = f"step 13: {term} is not finite, for the tenth step in a row"
    reason += "; lower --train.learning-rate, or look for extreme values in the data"
    message = rf"^{reason}; last good checkpoint: '(.*)'$"
    with pytest.raises(TrainingStopped, match=message) as error:
        run(config, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert str(newest(tmp_path / "run")) in str(error.value)
    # The streak is remembered: a run that is resumed in the middle of it stops at the same step.
    with pytest.raises(TrainingStopped, match=r"^step 13: "):
        poison(monkeypatch, set(range(100)), term)
        run(config, tmp_path / "run", resume=True)


def test_mistakes_leave_no_folder(tmp_path):
    for config, message in (
        (
            tiny(batch=38),
            "batch=38 is more than the 37 sequences of the training set",
        ),
        (tiny(fsdp=True), "fsdp=True needs processes to shard over"),
        (tiny(device="cuda:99"), "device='cuda:99' is not available here"),
        (
            replace(tiny(), model=small_config("rnn", "categorical")),
            "head='categorical' does not suit",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_pictures_are_drawn_and_show_the_last_weights(tmp_path):
    """The last picture must not be made from work that `generate` remembers of the first."""
    folder = run(tiny("tvae", samples=2, epochs=2), tmp_path / "run")
    assert log(folder, "valid")[-1]["best"]  # so the best weights are the last ones
    x = vssm.generate(vssm.load(folder), num=2, length=5, seed=0).x
    draw(open_data(DATA).meta, x, tmp_path / "expected.png")
    assert (folder / "samples.png").read_bytes() == (tmp_path / "expected.png").read_bytes()


def test_progress_speaks_of_what_matters(tmp_path, capsys, monkeypatch):
    poison(monkeypatch, {2})
    for shown in (Lines(), Bar()):
        run(tiny(epochs=2), tmp_path / type(shown).__name__, progress=shown)
        text = " ".join(capsys.readouterr().out.split())
        assert "valid loss" in text
        assert "(best)" in text
    run(None, tmp_path / "Lines", resume=True, progress=Lines())
    assert capsys.readouterr().out == f"{str(tmp_path / 'Lines')!r} is finished: 6 of 6 steps\n"


def test_validation_uses_the_first_sequences_when_told(tmp_path):
    folder = run(tiny("rnn", epochs=1, num_valid=3, batch=2, log_every=50), tmp_path / "run")
    x = open_data(DATA).valid.batch(slice(0, 3))
    expected = objective(vssm.load(folder), x).loss.mean().item()
    assert log(folder, "valid")[-1]["loss"] == pytest.approx(expected, rel=1e-5)


def test_presets_have_the_settings_of_the_paper():
    # A table of any size gets the steps that the page on forecasting promises.
    assert PRESETS["series"].train.max_steps == 3000 <= PRESETS["series"].train.epochs
    for name, data, features in (("paper-mnist", "mnist", 28), ("paper-cifar10", "cifar10", 96)):
        config = PRESETS[name]
        assert config.data.name == data
        assert config.model == ModelConfig(
            kind="vssm",
            features=features,
            width=1024,
            layers=4,
            state_size=16,
            heads=8,
            latents=32,
            classes=32,
            head="gaussian",
            sigma=0.1,
        )
        assert (config.train.epochs, config.train.learning_rate) == (200, 1e-3)
        assert (config.train.num_valid, config.train.max_steps) == (None, None)
        assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("epochs", 0, "a whole number >= 1"),
        ("batch", 2.5, "a whole number >= 1"),
        ("batch", True, "a whole number >= 1"),
        ("learning_rate", 0, "a number > 0"),
        ("learning_rate", math.nan, "a number > 0"),
        ("weight_decay", -1, "a number >= 0"),
        ("warmup", 1.0, "a number >= 0 and < 1"),
        ("ema", 1.0, "a number >= 0 and < 1"),
        ("seed", -1, "a whole number >= 0 and < 9223372036854775808"),
        ("max_steps", 0, "a whole number >= 1"),
        ("compile", 1, "True or False"),
        ("graph", 1, "True or False"),
    ],
)
def test_bad_options_are_named(field, value, allowed):
    with pytest.raises(ValueError, match=f"^{field} is {value!r}; it must be {allowed}$"):
        TrainConfig(**{field: value})


def test_a_number_of_epochs_past_all_steps_is_no_validation_but_the_last(tmp_path):
    folder = run(tiny(epochs=1, validate_every=1e99), tmp_path / "run")
    assert [line["step"] for line in log(folder, "valid")] == [3]


def test_bad_choices_are_named():
    with pytest.raises(
        ValueError, match=r"precision='bfloat' is unknown; choose from .*did you mean 'bfloat16'"
    ):
        TrainConfig(precision="bfloat")
    with pytest.raises(
        ValueError, match="device='gpu' is unknown; choose from 'auto', 'cpu', 'cuda', 'cuda:N'"
    ):
        TrainConfig(device="gpu")


def test_three_hundred_steps_on_mnist_beat_independent_pixels(data_dir, tmp_path):
    """The bar: each pixel a Gaussian of its own mean, with the same sigma as the model."""
    model = ModelConfig(
        kind="vssm", features=28, head="gaussian", width=64, layers=2, latents=16, classes=16
    )
    options = TrainConfig(
        max_steps=300, batch=64, learning_rate=3e-3, num_valid=512, validate_every=10, samples=0
    )
    config = RunConfig(data=DataConfig(name="mnist", dir=data_dir), model=model, train=options)
    valid = log(run(config, tmp_path / "run"), "valid")[-1]
    data = open_data(config.data)
    mean = data.train.batch(slice(None)).mean(0)
    pixels = torch.distributions.Normal(mean, model.sigma).log_prob(data.valid.batch(slice(0, 512)))
    independent = float(pixels.sum((1, 2)).mean())
    assert valid["reconstruction"] - valid["kl"] > independent + 500


@pytest.mark.parametrize(
    ("select", "kept"), [("loss", [True, True, False]), ("bound", [True, False, True])]
)
def test_weights_are_kept_by_loss_or_by_bound(select, kept, tmp_path, monkeypatch):
    """At the third validation the bound rises, but the partial term spoils the loss."""
    seen = iter([(9.0, 2.0, 1.0, -8.0), (8.0, 2.0, 1.5, -7.5), (8.5, 3.0, 1.0, -10.5)])
    means = lambda self: dict(zip(Terms._fields, next(seen), strict=True))  # noqa: E731
    monkeypatch.setattr(Trainer, "validation_means", means)
    folder = run(tiny("vssm", epochs=3, select=select), tmp_path / "run")
    assert [line["best"] for line in log(folder, "valid")] == kept
    best = {"loss": (8.0, 0.5, 2.0), "bound": (8.5, 2.0, 3.0)}[select]
    assert tuple(validations(folder)[0].values()) == best


@pytest.fixture
def ctrl_c():
    """Ctrl-C does what it usually does; processes that are started in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.SIGINT
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("minutes", [0.0, 9.0])  # a checkpoint at every step, or none yet
def test_a_signal_saves_first_and_acts_then(minutes, ctrl_c, tmp_path):
    config, folder = tiny(checkpoint_minutes=minutes, log_every=50), tmp_path / "run"
    progress = SignalAt(5, ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        run(config, folder, progress=progress)
    assert signal.getsignal(ctrl_c) is signal.default_int_handler
    assert (newest(folder).name, progress.messages[-1]) == (
        "step-00000005",
        "saved at step 5 of 12",
    )
    run(config, folder, resume=True)
    whole = run(config, tmp_path / "whole")
    assert (folder / "weights.safetensors").read_bytes() == (
        whole / "weights.safetensors"
    ).read_bytes()
    assert log(folder, "valid") == log(whole, "valid")
    assert [line["step"] for line in log(folder, "train")] == [3, 5, 6, 9, 12]


def test_a_signal_at_the_last_step_acts_when_all_is_written(ctrl_c, tmp_path):
    """Else a sweep would go on with the next run."""
    config, folder = tiny(), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(config, folder, progress=SignalAt(12, ctrl_c))
    assert signal.getsignal(ctrl_c) is signal.default_int_handler
    assert json.loads((folder / "meta.json").read_text())["ended"] is not None
    assert result(folder) == result(run(config, tmp_path / "whole"))


def test_a_second_signal_does_not_wait(ctrl_c, tmp_path, monkeypatch):
    def twice(self, step):
        signal.raise_signal(ctrl_c)
        signal.raise_signal(ctrl_c)
        pytest.fail("the second signal was put off as well")

    monkeypatch.setattr(Step, "take", twice)
    with pytest.raises(KeyboardInterrupt):
        run(tiny(), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_second_moments_decay_as_told(tmp_path):
    """The first step of Adam has the same length whatever the decay, later ones do not."""
    for steps, same in ((1, True), (3, False)):
        folders = [
            run(tiny("ssm", max_steps=steps, beta2=beta2), tmp_path / f"{steps}-{beta2}")
            for beta2 in (0.999, 0.5)
        ]
        one, other = (load_file(newest(folder) / "weights.safetensors") for folder in folders)
        close = [torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6) for name in one]
        assert all(close) == same


def test_an_ignored_signal_stays_ignored(ctrl_c, tmp_path):
    signal.signal(ctrl_c, signal.SIG_IGN)
    folder = run(tiny(), tmp_path / "run", progress=SignalAt(5, ctrl_c))
    assert log(folder)[-1]["step"] == 12


def watch(monkeypatch):
    """Notes what every training step and every validation batch is given."""
    steps, validations = [], []

    def watched(model, x, generator, *rest):
        (steps if torch.is_grad_enabled() else validations).append(
            (x.clone(), generator.initial_seed())
        )
        return objective(model, x, generator, *rest)

    monkeypatch.setattr("vssm.training.step.objective", watched)
    return steps, validations


def test_every_epoch_has_an_order_and_every_step_a_noise_of_its_own(tmp_path, monkeypatch):
    steps, validations = watch(monkeypatch)
    run(tiny("rnn", epochs=2, batch=3, validate_every=0.5, checkpoint_minutes=9), tmp_path / "run")
    first, second = (torch.cat([x for x, _ in part]) for part in (steps[:12], steps[12:]))
    assert len(first) == len(first.flatten(1).unique(dim=0)) == 36
    assert not torch.equal(first, second)
    assert len({seed for _, seed in steps}) == 24
    # Two batches a validation, the second filled up, of noise that is the same every time.
    assert len(validations) == 8
    assert [seed for _, seed in validations] == [seed for _, seed in validations[:2]] * 4
    assert len({seed for _, seed in validations}) == 2


def test_the_kl_counts_more_from_step_to_step(tmp_path, monkeypatch):
    seen = []

    def watched(model, x, generator, shard, lengths=None, weight=None):
        seen.append(None if weight is None else round(float(weight), 4))
        return objective(model, x, generator, shard, lengths, weight)

    monkeypatch.setattr("vssm.training.step.objective", watched)
    config = tiny("vssm", max_steps=6, kl_warmup=0.5, validate_every=9)
    run(config, tmp_path / "run")
    # The last is a validation.
    assert seen == [0.0, 0.3333, 0.6667, 1.0, 1.0, 1.0, None]


def test_images_are_moved_in_training_alone(tmp_path, monkeypatch):
    seen = {}

    def watched(model, x, *rest):
        seen[share].append((torch.is_grad_enabled(), x))
        return objective(model, x, *rest)

    monkeypatch.setattr("vssm.training.step.objective", watched)
    for share in (0.0, 0.5):
        seen[share] = []
        config = tiny(
            "vssm", DataConfig(name="digits"), max_steps=4, batch=64, shift=share, num_valid=32
        )
        folder = run(config, tmp_path / f"{share}")
    for (training, plain), (_, x) in zip(seen[0.0], seen[0.5], strict=True):
        equal = (plain == x).flatten(1).all(1).double().mean()
        assert 0.3 < equal < 0.8 if training else equal == 1
    again = stopped(config, tmp_path / "stopped", 2)
    assert log(run(None, again, resume=True)) == log(folder)
    with pytest.raises(
        ValueError,
        match=r"^shift=0.5 is for images, and data set 'synthetic' has none; use --train.sh",
    ):
        run(tiny(shift=0.5), tmp_path / "none")
    with pytest.raises(ValueError, match=r"^shift is 1; it must be a number >= 0 and < 1"):
        TrainConfig(shift=1)


@pytest.mark.parametrize(("kind", "levels"), [*((kind, 1) for kind in KINDS), ("vssm", 3)])
def test_validations_bound_the_second_half_too(kind, levels, tmp_path):
    config = tiny(kind, ema=0.8, epochs=1, seed=5)
    config = replace(config, model=replace(config.model, levels=levels))
    watched = replace(config, train=replace(config.train, validate_partial=True))
    plain, scored = run(config, tmp_path / "plain"), run(watched, tmp_path / "scored")
    *_, last = log(scored)
    assert [*log(plain)[:-1], {**last}] == log(scored) and "partial_elbo" not in log(plain)[-1]
    assert {key: last[key] for key in last if key != "partial_elbo"} == log(plain)[-1]
    x = open_data(DATA).valid.batch(slice(None))
    expected = vssm.log_likelihood(
        vssm.load(scored), x, num_samples=1, prompt_length=2, seed=5
    ).mean()
    assert last["partial_elbo"] == pytest.approx(float(expected), rel=1e-5)
    assert validations(scored)[1]["validation_partial_elbo"] == [round(last["partial_elbo"], 3)]
    assert "validation_partial_elbo" not in validations(plain)[1]


def test_validate_partial_is_yes_or_no():
    with pytest.raises(ValueError, match=r"^validate_partial is 'no'; it must be True or False$"):
        TrainConfig(validate_partial="no")


def test_sequences_of_one_step_have_no_second_half(tmp_path):
    data = DataConfig(name="synthetic", synthetic=SyntheticConfig(length=1, features=3, num=41))
    assert (
        "partial_elbo" not in log(run(tiny(data=data, validate_partial=True), tmp_path / "run"))[-1]
    )


def test_gradients_are_clipped_and_told_per_value():
    learner = Learner(small_model("rnn"), TrainConfig(clip=0.25), World(torch.device("cpu")))
    weights = list(learner.parameters.values())
    whole = 2 * math.sqrt(sum(float(weight.detach().square().sum()) for weight in weights))
    for _ in range(2):  # gradients of the step before do not count
        norm = learner.differentiate(sum(weight.square().sum() for weight in weights), 8)
        assert float(norm) == pytest.approx(whole / 8, rel=1e-5)
        clipped = math.sqrt(sum(float(weight.grad.square().sum()) for weight in weights))
        assert clipped == pytest.approx(0.25 * 8, rel=1e-4) and clipped < whole


def test_the_average_follows_fast_at_first():
    learner = Learner(small_model("rnn"), TrainConfig(ema=0.2), World(torch.device("cpu")))
    for step, pace in ((1, 0.9), (3, 0.8)):  # 1 / 10 and 3 / 12, of which 0.2 is less
        before = {name: average.clone() for name, average in learner.ema.items()}
        learner.begin(step, 10)
        learner.differentiate(
            sum(weight.square().sum() for weight in learner.parameters.values()), 1
        )
        learner.update(torch.tensor(True))
        for name, weight in learner.parameters.items():
            expected = before[name] + pace * (weight.detach() - before[name])
            torch.testing.assert_close(learner.ema[name], expected)


def test_the_weights_come_back_when_something_fails_while_their_average_is_in_place():
    learner = Learner(small_model("rnn"), TrainConfig(ema=0.5), World(torch.device("cpu")))
    for average in learner.ema.values():
        average.fill_(7)
    before = {name: weight.detach().clone() for name, weight in learner.parameters.items()}
    with pytest.raises(OSError, match="disk"), learner.averaged():
        assert all((weight == 7).all() for weight in learner.parameters.values())
        raise OSError("the disk is full")
    assert all(torch.equal(weight, before[name]) for name, weight in learner.parameters.items())


def test_a_log_point_has_the_means_since_the_last():
    tally, good = Tally(torch.device("cpu")), torch.tensor(True)
    for value, finite in ((1.0, good), (3.0, good), (math.nan, ~good)):
        tally.add(torch.full((5,), value), finite)
    assert tally.fetch() == (dict.fromkeys(Tally.names, 2.0), 1, 1)
    tally.add(torch.full((5,), 7.0), good)
    assert tally.fetch() == (dict.fromkeys(Tally.names, 7.0), 1, 0)
    assert all(map(math.isnan, tally.fetch()[0].values()))


def test_samples_are_of_the_average_of_the_weights(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("vssm.training.loop.draw", lambda meta, x, path: drawn.append(x))
    folder = run(tiny("rnn", samples=2, epochs=2, ema=0.8), tmp_path / "run")
    assert log(folder, "valid")[-1]["best"]  # so the weights that were kept are the last average
    assert torch.equal(drawn[-1], vssm.generate(vssm.load(folder), num=2, length=5, seed=0).x)


def test_a_resumed_run_goes_on_counting(tmp_path, monkeypatch):
    poison(monkeypatch, {2})
    folder = stopped(tiny(), tmp_path / "run", 11)
    before = json.loads((newest(folder) / "progress.json").read_text())
    run(None, folder, resume=True)
    assert [line["skipped"] for line in log(folder, "train")] == [0, *[1] * 11]
    last = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
    assert last["seconds"] > before["seconds"] > 0


def test_checkpoints_are_minutes_apart_and_times_are_those_of_the_clock(tmp_path, monkeypatch):
    """Every step takes a minute."""
    now, saved, save = [0.0], [], Trainer.save

    class Clock(Progress):
        def step(self, step):
            now[0] += 60

    def watched(training, *rest):
        saved.append(training.step)
        save(training, *rest)

    monkeypatch.setattr("vssm.training.loop.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Trainer, "save", watched)
    config = tiny(checkpoint_minutes=5.0, log_every=2, validate_every=9)
    lines = (run(config, tmp_path / "run", progress=Clock()) / "log.jsonl").read_text().splitlines()
    assert saved == [6, 12]  # a log point comes every other step
    train = [line for line in map(json.loads, lines) if line["split"] == "train"]
    assert [line["seconds"] for line in train] == [60 * line["step"] for line in train]
    assert {line["tokens_per_second"] for line in train} == {
        1.0
    }  # twelve sequences of five steps a minute


def test_a_bad_step_leaves_the_average_where_it_was():
    learner = Learner(small_model("rnn"), TrainConfig(ema=0.5), World(torch.device("cpu")))
    for step, good in ((1, True), (2, False)):
        before = {name: average.clone() for name, average in learner.ema.items()}
        learner.begin(step, 10)
        learner.differentiate(
            sum(weight.square().sum() for weight in learner.parameters.values()), 1
        )
        learner.update(torch.tensor(good))
        assert {torch.equal(learner.ema[name], before[name]) for name in before} == {not good}


def test_steps_after_the_tenth_bad_one_do_not_change_what_is_said():
    """On a GPU it is said at the next log point, some steps later."""
    tally, bad = Tally(torch.device("cpu")), torch.tensor(False)
    for _ in range(13):
        tally.add(torch.tensor([math.nan, 0.0, math.nan, 0.0, 0.0]), bad)
    with pytest.raises(
        TrainingStopped,
        match=r"^step 10: kl is not finite, for the tenth step in a row; lower --train.learning",
    ):
        tally.fetch()


def test_a_checkpoint_without_some_weights_is_refused():
    learner = Learner(small_model("rnn"), TrainConfig(ema=0.5), World(torch.device("cpu")))
    parts = {name: dict(part) for name, part in learner.tensors().items()}
    for part in ("weights", "ema"):
        lacking = parts | {part: {k: v for k, v in parts[part].items() if k != "stack.blank"}}
        with pytest.raises(
            ValueError, match=rf"^'there' has no {part} 'stack\.blank' of shape \(16,\)$"
        ):
            learner.restore(lacking, "there")
    learner.restore(parts, "there")


@pytest.mark.parametrize("binarize", [False, True])
def test_a_bernoulli_head_on_grey_values_is_warned_about(binarize, tmp_path):
    config = tiny("ssm", DataConfig(name="digits", binarize=binarize), max_steps=1)
    config = replace(config, model=replace(config.model, head="bernoulli"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        run(config, tmp_path / "run")
    told = [str(w.message) for w in caught if "pseudo-likelihoods" in str(w.message)]
    assert len(told) == (not binarize)
    assert all("--binarize" in text and "\n" not in text for text in told)
