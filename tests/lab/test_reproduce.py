"""The paper's experiments in small: the ranking comes out, and nothing is done twice."""

import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vssm
import vssm.lab.reproduce
from tests.conftest import small_config, small_model
from vssm.cli import main
from vssm.config import RunConfig
from vssm.data import DataConfig, SeriesConfig
from vssm.data.dataset import hold_out
from vssm.lab.reproduce import TRAINING_SETS, reproduce
from vssm.runs import pretrained
from vssm.training.loop import TrainingStopped
from vssm.training.progress import Progress

ROOT = Path(__file__).parents[2]
ship = runpy.run_path(str(ROOT / "experiments" / "ship_model.py"))
KINDS = ("ssm", "vssm")
BUDGET = {"kinds": KINDS, "epochs": 6, "grid_epochs": 1}
BUDGET["learning_rates"] = (1e-2, 1e-3)
NAMES = {  # those that design and page rely on
    *("log_likelihood", "partial_log_likelihood", "epochs", "train_seconds", "learning_rate"),
    *("generate_ms_b1", "prompted_ms_b1", "validation_loss", "parameters"),
}
LATENT = {"elbo", "reconstruction", "kl", "log_likelihood_empty_prior"}
LATENT |= {
    f"{name}_particles"
    for name in ("log_likelihood", "log_likelihood_empty_prior", "partial_log_likelihood")
}


def read(path):
    return json.loads(path.read_text())


def digits(out, **options):
    """The experiments on digits, silent and on one thread, which is quickest for so little."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        reproduce("digits", "small", out, progress=options.pop("progress", Progress()), **options)
    finally:
        torch.set_num_threads(threads)


class Messages(Progress):
    def __init__(self):
        self.texts = []

    def message(self, text):
        self.texts.append(text)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("reproduce")
    digits(out, **BUDGET)
    return out


@pytest.fixture
def out(done, tmp_path):
    """A new folder, after the classifier was trained, which takes seconds."""
    return tmp_path


def test_ranking_of_the_paper_comes_out(done):
    found = {
        kind: read(done / "results" / f"digits_{kind}_seed0.json")["metrics"] for kind in KINDS
    }
    for name, gain in (("log_likelihood", 5), ("partial_log_likelihood", 2)):
        assert found["vssm"][name] > found["ssm"][name] + gain


def test_everything_is_kept(done):
    for kind in KINDS:
        made = read(done / "results" / f"digits_{kind}_seed0.json")
        metrics, curve = made["metrics"], made["curve"]
        assert set(metrics) >= (NAMES | LATENT if kind == "vssm" else NAMES)
        assert metrics["epochs"] == 6
        assert metrics["sequences"] == 359
        assert (
            len(curve["epoch"]) == len(curve["validation_elbo"]) == 2
        )  # after 5 epochs and at the end
        whole, half = curve["validation_elbo"][-1], curve["validation_partial_elbo"][-1]
        assert math.isfinite(half) and abs(half - whole) > 1
        assert made["config"]["train"]["validate_partial"]
        assert made["command"] == (
            f"vssm reproduce digits --scale small --kinds {kind} --learning-rates 0.01 0.001 "
            "--seeds 0 --epochs 6 --grid-epochs 1"
        )
        grid = {
            rate: read(done / "results" / "grid" / f"digits_{kind}_lr{rate}.json")["metrics"]
            for rate in (0.01, 0.001)
        }
        best = min(grid, key=lambda rate: grid[rate]["validation_loss"])
        assert metrics["learning_rate"] == made["config"]["train"]["learning_rate"] == best
        assert all(metrics["epochs"] == 1 for metrics in grid.values())
        assert vssm.load(done / "runs" / f"{kind}-lr{best}-seed0").config.kind == kind
    assert not list(done.rglob("checkpoint"))
    assert (done / "figure.png").is_file()
    kept = [path for path in (done / "results").rglob("*") if path.is_file()]
    assert len(kept) == 4 + 2 + 2
    assert max(path.stat().st_size for path in kept) < 1e6
    assert str(done) not in "".join(path.read_text() for path in kept if path.suffix == ".json")


def test_finished_pieces_are_not_repeated(done, tmp_path, monkeypatch):
    """Results alone decide: on another machine there are no runs."""
    with monkeypatch.context() as patch:
        patch.setattr(
            vssm.lab.reproduce, "run_grid", lambda *_, **__: pytest.fail("a run was started")
        )
        digits(tmp_path, results=done / "results", **BUDGET)
    assert (tmp_path / "figure.png").is_file()

    copy = shutil.copytree(done, tmp_path / "copy")
    piece = copy / "results" / "digits_ssm_seed0.json"
    before = {path: path.stat().st_mtime_ns for path in copy.glob("results/*.json")}
    scored = read(piece)["metrics"]
    piece.unlink()
    shown = Messages()
    digits(copy, progress=shown, **BUDGET)  # scored again, not trained again
    assert any("1 runs, 1 of them ended before" in text for text in shown.texts)
    assert any(
        re.search(r"^seeds: \d of \d are in .* already and not run again$", t) for t in shown.texts
    )
    assert read(piece)["metrics"]["log_likelihood"] == scored["log_likelihood"]
    after = {path: path.stat().st_mtime_ns for path in copy.glob("results/*.json")}
    assert [path for path in before if before[path] != after[path]] == [piece]


def test_results_of_other_settings_are_refused(done):
    for epochs in (9, 1.5):
        message = rf"^train.epochs={math.ceil(epochs)} differs from 6 of '.*digits_ssm_seed0.json'"
        with pytest.raises(ValueError, match=message):
            digits(done, **{**BUDGET, "epochs": epochs})
    path = done / "results" / "digits_ssm_seed1.json"
    path.write_text("{")
    try:
        with pytest.raises(ValueError, match=r"digits_ssm_seed1.json' is damaged"):
            digits(done, seeds=(0, 1), **BUDGET)
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("piece", "damage"),
    [
        ("grid/digits_ssm_lr0.01.json", lambda c: c.pop("metrics")),
        ("grid/digits_ssm_lr0.01.json", lambda c: c["metrics"].update(validation_loss="x")),
        ("digits_ssm_seed0.json", lambda c: c.update(metrics={})),
        ("digits_ssm_seed0.png", None),
    ],
)
def test_damaged_results_are_named(piece, damage, done, tmp_path):
    results = shutil.copytree(done / "results", tmp_path / "results")
    path = results / piece
    if damage is None:
        path.write_bytes(path.read_bytes()[:100])
    else:
        content = read(path)
        damage(content)
        path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"{path.name}' is damaged: .*; remove it$"):
        digits(tmp_path / "out", results=results, **BUDGET)


def test_killed_in_a_run_the_same_call_continues(out):
    options = {"kinds": ("rnn",), "learning_rates": (5e-3,), "epochs": 6}
    call = f"reproduce('digits', 'small', {str(out)!r}, **{options!r})"
    code = f"from vssm.lab.reproduce import reproduce; {call}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL
    )
    while not list(out.glob("runs/*/log.jsonl")) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not list(out.glob("results/*.json"))
    digits(out, **options)
    assert read(out / "results" / "digits_rnn_seed0.json")["metrics"]["epochs"] == 6


def test_command_shows_the_results(done, tmp_path, capsys):
    options = ["--scale", "small", "--kinds", *KINDS, "--epochs", "6", "--grid-epochs", "1"]
    options += ["--learning-rates", "1e-2", "1e-3"]
    folders = ["--out", str(tmp_path), "--results", str(done / "results")]
    main(["reproduce", "digits", *options, *folders])
    shown = capsys.readouterr().out
    for kind in KINDS:
        metrics = read(done / "results" / f"digits_{kind}_seed0.json")["metrics"]
        assert re.search(rf"^{kind} +{metrics['log_likelihood']:.2f} ", shown, re.MULTILINE)
    assert f"figure: {tmp_path / 'figure.png'}\n" in shown


def test_figures_are_drawn_even_if_a_run_fails(done, tmp_path):
    (tmp_path / "runs" / "ssm-lr0.01-seed1").mkdir(parents=True)
    (tmp_path / "runs" / "ssm-lr0.01-seed1" / "foreign").touch()
    options = {**BUDGET, "kinds": ("ssm",), "seeds": (0, 1)}
    results = shutil.copytree(done / "results", tmp_path / "results")
    chosen = read(results / "digits_ssm_seed0.json")["metrics"]["learning_rate"]
    (tmp_path / "runs" / "ssm-lr0.01-seed1").rename(tmp_path / "runs" / f"ssm-lr{chosen}-seed1")
    with pytest.raises(ValueError, match=r"^1 of 1 runs failed; ssm-lr.*-seed1"):
        digits(tmp_path, **options)
    assert (tmp_path / "figure.png").is_file()


class Fail(Progress):
    """Fails the first runs with these reasons."""

    def __init__(self, *reasons):
        self.reasons = list(reasons)

    def start(self, step, total):
        if self.reasons:
            raise TrainingStopped(self.reasons.pop(0))


DIVERGED = "step 12: loss is not finite, for the tenth step in a row"
SHORT = {"kinds": ("rnn",), "learning_rates": (1e-2, 1e-3), "epochs": 1}


def test_rate_that_diverged_is_recorded_and_not_used(out):
    digits(out, progress=Fail(DIVERGED), **SHORT)
    grid = out / "results" / "grid"
    assert read(grid / "digits_rnn_lr0.01.json")["metrics"]["validation_loss"] is None
    scored = read(out / "results" / "digits_rnn_seed0.json")
    assert scored["metrics"]["learning_rate"] == 1e-3
    message = r"^kind='rnn' diverged at every learning rate of \(0.01, 0.001\)"
    with pytest.raises(ValueError, match=message):
        digits(out / "all", progress=Fail(DIVERGED, DIVERGED), **SHORT)
    with pytest.raises(ValueError, match=r"^1 of 2 runs failed; rnn-lr0.01-seed0: out of memory"):
        digits(out / "memory", progress=Fail("out of memory"), **SHORT)
    assert not list((out / "memory").rglob("digits_rnn_lr0.01.json"))


def test_finalists_are_trained_to_the_end_before_one_is_chosen(out, monkeypatch):
    options = {"kinds": ("rnn",), "epochs": 2, "grid_epochs": 1, "finalists": 2}
    options |= {"learning_rates": (1e-2, 5e-3, 1e-3)}
    digits(out, **options)

    def losses(stage):
        files = (out / "results" / stage).glob("digits_rnn_lr*.json")
        metrics = [read(path)["metrics"] for path in files]
        assert {values["epochs"] for values in metrics} == {1 if stage == "grid" else 2}
        return {values["learning_rate"]: values["validation_loss"] for values in metrics}

    grid, finals = losses("grid"), losses("finals")
    assert len(grid) == 3 and set(finals) == set(sorted(grid, key=grid.get)[:2])
    made = read(out / "results" / "digits_rnn_seed0.json")
    assert made["metrics"]["learning_rate"] == min(finals, key=finals.get)
    assert "--grid-epochs 1 --finalists 2" in made["command"]
    assert "--kinds rnn" in made["command"]
    assert len(list((out / "runs").glob("rnn-*"))) == 2, "the final run is the scored one"
    monkeypatch.setattr(
        vssm.lab.reproduce, "run_grid", lambda *_, **__: pytest.fail("a run was started")
    )
    digits(out, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["mnits"],
            "data='mnits' is unknown; choose from 'mnist', 'cifar10', 'digits' (did you mean",
        ),
        (["digits"], "scale='paper' has no data='digits'; use scale='small'"),
        (["mnist", "--scale", "tiny"], "scale='tiny' is unknown; choose from 'paper', 'small'"),
        (
            ["mnist", "--seeds", "1", "1"],
            "seeds=(1, 1) must be one or more different values",
        ),
        (["mnist", "--epochs", "0"], "epochs is 0.0; it must be a number > 0"),
        (
            ["mnist", "--finalists", "2"],
            "finalists=2 is not allowed: every rate is trained to the end",
        ),
        (
            ["mnist", "--grid-epochs", "2", "--finalists", "9"],
            "finalists=9 is not allowed: more than the grid has rates",
        ),
        (["mnist", "--kinds", "vsm"], "kind='vsm' is unknown"),
        (["mnist", "--seeds", "0", "-1"], "seed is -1; it must be a whole number >= 0"),
        (
            ["mnist", "--learning-rates", "0"],
            "learning_rate is 0.0; it must be a number > 0",
        ),
    ],
)
def test_mistakes_are_named_before_anything_is_written(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", *arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_data_that_is_not_there_is_named_before_any_run(tmp_path, monkeypatch):
    monkeypatch.setattr(
        vssm.lab.reproduce, "run_grid", lambda *_, **__: pytest.fail("a run was started")
    )
    with pytest.raises(ValueError, match=r"nowhere' is not a folder"):
        reproduce(
            "mnist", out=tmp_path / "out", results=tmp_path, data_dir=str(tmp_path / "nowhere")
        )


@pytest.fixture
def shelf(done, tmp_path, monkeypatch):
    """A package that ships one model, of digits."""
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path / "shelf")
    run = next((done / "runs").glob("vssm-*"))
    ship["export"](run, tmp_path / "shelf" / "digits-small")
    monkeypatch.chdir(tmp_path)
    return run


def test_a_shipped_model_is_found_by_its_name(shelf, tmp_path, capsys):
    assert pretrained.names() == ("digits-small",)
    model, original = vssm.load("digits-small"), vssm.load(shelf)
    for (name, given), expected in zip(
        model.named_parameters(), original.parameters(), strict=True
    ):
        assert torch.equal(given, expected.bfloat16().float()), name
    folder = tmp_path / "shelf" / "digits-small"
    assert {t.dtype for t in load_file(folder / "weights.safetensors").values()} == {torch.bfloat16}
    main(["generate", "digits-small", "--num", "4", "--out", "digits.png"])
    assert Path("digits.png").read_bytes().startswith(b"\x89PNG")

    main(["evaluate", "digits-small", "--num-samples", "2", "--num-images", "64"])
    assert not (folder / "eval.json").exists(), "an installed package is not written to"
    shutil.copy(Path("runs") / "digits-small" / "eval.json", folder)
    nats = read(folder / "eval.json")["metrics"]["log_likelihood"]
    card = ship["write_card"](folder).read_text()
    for part in (
        'vssm.load("digits-small")',
        "## Limits",
        "## Licence",
        "vssm train digits",
        f"{nats:.6g}",
    ):
        assert part in card, part
    assert "hf://" not in card and "in one shot from nothing are worse" in card
    with pytest.raises(ValueError, match="has metrics of other weights; use a new folder"):
        ship["export"](shelf, folder)


def test_a_folder_of_the_same_name_comes_first(shelf):
    vssm.save(small_model("rnn"), "digits-small")
    assert vssm.load("digits-small").config.kind == "rnn"
    shutil.rmtree("digits-small")
    assert vssm.load("digits-small").config.kind == "vssm"


def test_an_unknown_name_is_answered_with_those_there_are(shelf, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"^'digit' does not exist; use .* \('digits-small'\)$"):
        vssm.load("digit")
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"or a shipped model \(none in this version\)$"):
        vssm.load("digits-small")
    with pytest.raises(ValueError, match=r"^'nowhere' does not exist; use a run folder"):
        ship["export"]("nowhere", tmp_path / "new")


def test_a_model_for_shipping_says_nothing_of_folders(tmp_path):
    series = SeriesConfig(path="/home/somebody/secret/sales.csv")
    data = DataConfig(name="series", dir="/home/somebody/data", series=series)
    config = RunConfig(data=data, model=small_config("rnn"))
    vssm.save(small_model("rnn"), tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config.to_dict()))
    folder = ship["export"](tmp_path / "run", tmp_path / "new")
    values = read(folder / "config.json")
    assert values["data"]["series"]["path"] == "sales.csv"
    assert values["data"]["dir"] is None
    assert values["model"] == config.to_dict()["model"]
    assert not any("somebody" in path.read_text() for path in folder.glob("*.[jm]*"))
    for damage in ({"data": None}, {"data": "series"}):
        (tmp_path / "run" / "config.json").write_text(json.dumps({**config.to_dict(), **damage}))
        with pytest.raises(ValueError, match=r"config.json': data is .*; it must be a dictionary"):
            ship["export"](tmp_path / "run", tmp_path / "other")


def test_shipped_models_are_whole_and_small():
    for pattern, most in (
        ("mnist-small*", 12),
        ("mnist-best-small", 8),
        ("mnist-any-small", 8),
    ):  # MiB
        files = [path for path in pretrained.FOLDER.glob(f"{pattern}/*") if path.suffix != ".pyc"]
        assert 0 < sum(path.stat().st_size for path in files) < most * 2**20
    for name in pretrained.names():
        folder = pretrained.FOLDER / name
        assert {"config.json", "eval.json", "weights.safetensors", "README.md"} <= {
            f.name for f in folder.iterdir()
        }
        model = vssm.load(name)
        if model.config.given:
            x = torch.full((2, 28, model.config.features), torch.nan)
            x[..., -model.config.given :] = 0.0
            x = vssm.fill(model, x)
        else:
            x = vssm.generate(model, num=2, length=28).x
        assert torch.isfinite(x).all()


def test_training_sets_have_the_sizes_that_steps_are_counted_by():
    totals = {"mnist": 60_000, "cifar10": 50_000, "digits": 1797 - 359}
    sizes = {name: len(hold_out(total, seed=0)[0]) for name, total in totals.items()}
    assert sizes == TRAINING_SETS
