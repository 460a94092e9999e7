"""A sweep trains what is missing, records what failed, and never trains a combination twice."""

import json
import re
from dataclasses import replace

import pytest

import vssm.lab.sweep
from vssm import build, load, save
from vssm.config import ModelConfig, RunConfig, TrainConfig
from vssm.data import DataConfig, SyntheticConfig
from vssm.lab.sweep import sweep
from vssm.training.loop import TrainingStopped
from vssm.training.progress import Progress

BASE = RunConfig(
    data=DataConfig(name="synthetic", synthetic=SyntheticConfig(length=5, features=3, num=40)),
    model=ModelConfig(kind="rnn", features=1, head="auto", width=8, layers=1),
    train=TrainConfig(
        epochs=2, batch=12, log_every=1, checkpoint_minutes=0, samples=0, device="cpu"
    ),
)
RATES, SEEDS = (1e-2, 1e-3), (0, 1)
NAMES = [f"rnn-lr{rate}-seed{seed}" for rate in RATES for seed in SEEDS]


def written_at(folder):
    """When each run was last worked on: `train` writes meta.json at its start and end."""
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/meta.json")}


def log(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def table(folder):
    return json.loads((folder / "sweep.json").read_text())


class StopAfter(Progress):
    """Stops the sweep as Ctrl-C does, once so many runs have ended."""

    def __init__(self, ended):
        self.ended = ended

    def message(self, text):
        if text.startswith(f"{self.ended}/"):
            raise KeyboardInterrupt


@pytest.fixture
def fake_train(monkeypatch):
    """Replaces training: `losses` has the loss or the error of a learning rate and seed."""
    losses, calls = {}, []

    def train(config, folder, resume=False, progress=None):
        calls.append((folder.name, resume))
        folder.mkdir(exist_ok=True)
        (folder / "meta.json").write_text(json.dumps({"ended": None}))
        loss = losses[config.train.learning_rate, config.train.seed]
        if isinstance(loss, BaseException):
            raise loss
        facts = {"ended": "now", "best_validation_loss": loss, "seconds": 1.5}
        (folder / "meta.json").write_text(json.dumps(facts))
        return folder

    monkeypatch.setattr(vssm.lab.sweep, "train", train)
    return losses, calls


def test_runs_that_start_from_a_model_are_found_again(tmp_path):
    save(
        build(ModelConfig(kind="rnn", features=3, width=8, layers=1, sigma=0.3)), tmp_path / "first"
    )
    init = replace(BASE.train, init=str(tmp_path / "first"))
    onward = replace(BASE, model=RunConfig().model, train=init)
    rows = [sweep(onward, tmp_path / "runs", (1e-2,), (0,), progress=Progress()) for _ in range(2)]
    assert rows[0] == rows[1]
    assert load(tmp_path / "runs" / rows[0][0]["folder"]).config.sigma == 0.3


def test_in_this_process_stopped_and_started_again(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        sweep(BASE, tmp_path, RATES, (0,), progress=StopAfter(1))
    before = written_at(tmp_path)
    assert list(before) == NAMES[:1]
    assert [row["folder"] for row in table(tmp_path)["runs"]] == NAMES[:1]

    rows = sweep(BASE, tmp_path, RATES, (0,), progress=Progress())
    assert [row["folder"] for row in rows] == [NAMES[0], NAMES[2]]
    assert written_at(tmp_path)[NAMES[0]] == before[NAMES[0]]
    for row in rows:
        losses = [
            line["loss"] for line in log(tmp_path / row["folder"]) if line["split"] == "valid"
        ]
        assert row["validation_loss"] == min(losses)
        assert (row["status"], row["reason"]) == ("finished", None)
        assert load(tmp_path / row["folder"]).config.kind == "rnn"
    assert table(tmp_path)["runs"] == rows


def test_one_sweep_at_a_time_in_a_folder(tmp_path):
    class Second(Progress):
        """Starts another sweep there while the first is on."""

        def message(self, text):
            if "1 runs, 0 of them ended" in text:
                with pytest.raises(
                    ValueError, match=f"^sweep folder '{tmp_path}' is in use by another proc"
                ):
                    sweep(BASE, tmp_path, (1e-2,), progress=Progress())
                refused.append(text)

    refused = []
    rows = sweep(BASE, tmp_path, (1e-2,), progress=Second())
    assert len(refused) == 1 and [row["status"] for row in rows] == ["finished"]
    assert sweep(BASE, tmp_path, (1e-2,), progress=Progress()) == rows  # it is free again


def test_runs_of_other_settings_are_refused(tmp_path):
    sweep(BASE, tmp_path, (1e-3,), progress=Progress())
    before = written_at(tmp_path)
    with pytest.raises(
        ValueError, match=r"^train.epochs=3 differs from 2 of the run in '.*-lr0.001-seed0'"
    ):
        sweep(
            replace(BASE, train=replace(BASE.train, epochs=3)),
            tmp_path,
            (1e-3,),
            progress=Progress(),
        )
    with pytest.raises(ValueError, match=r"^model.head='gaussian-learned' differs from"):
        model = replace(BASE.model, head="gaussian-learned")
        sweep(replace(BASE, model=model), tmp_path, (1e-3,), progress=Progress())
    assert written_at(tmp_path) == before


def test_a_failed_run_is_recorded_and_tried_again(tmp_path, fake_train):
    losses, calls = fake_train
    losses |= {
        (1e-2, 0): TrainingStopped("step 12: kl is not finite,\nfor the tenth step in a row"),
        (1e-2, 1): RuntimeError("out of memory"),
        (1e-3, 0): 3.0,
        (1e-3, 1): float("nan"),
    }
    rows = sweep(BASE, tmp_path, RATES, SEEDS, progress=Progress())
    assert [(row["status"], row["validation_loss"], row["reason"]) for row in rows] == [
        ("failed", None, "step 12: kl is not finite, for the tenth step in a row"),
        ("failed", None, "RuntimeError: out of memory"),
        ("finished", 3.0, None),
        ("finished", None, None),
    ]
    assert table(tmp_path) == {"best": {}, "runs": rows}  # half of the seeds is no median

    calls.clear()
    losses[1e-2, 0] = losses[1e-2, 1] = 4.0
    rows = sweep(BASE, tmp_path, RATES, SEEDS, progress=Progress())
    assert [name for name, _ in calls] == NAMES[:2]
    assert table(tmp_path)["best"] == {"rnn": {"learning_rate": 0.01, "validation_loss": 4.0}}


def test_best_rate_has_the_lowest_median_for_every_kind(tmp_path, fake_train):
    losses, calls = fake_train
    losses |= dict(zip([(r, s) for r in RATES for s in (0, 1, 2)], [1, 9, 8, 5, 7, 6], strict=True))
    rows = sweep(BASE, tmp_path, RATES, (0, 1, 2), kinds=("ssm", "vssm"), progress=Progress())
    assert len(rows) == len(calls) == 12
    assert {row["folder"] for row in rows} == {
        path.name for path in tmp_path.iterdir() if path.is_dir()
    }
    expected = {"learning_rate": 1e-3, "validation_loss": 6}
    assert table(tmp_path)["best"] == {"ssm": expected, "vssm": expected}


def test_run_with_a_damaged_meta_file_is_trained_again(tmp_path, fake_train):
    losses, calls = fake_train
    losses[1e-3, 0] = 2.0
    ended = b'{"ended": "now", "best_validation_loss": "low", "seconds": 1}'
    for damage in (ended, b"", b"[]", b'{"ended": "now"}', b'{"ended": null, "seconds": 1}'):
        (tmp_path / NAMES[2]).mkdir(exist_ok=True)
        (tmp_path / NAMES[2] / "meta.json").write_bytes(damage)
        calls.clear()
        assert sweep(BASE, tmp_path, (1e-3,), progress=Progress())[0]["validation_loss"] == 2.0
        assert len(calls) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"learning_rates": ()},
            "learning_rates=() must be one or more different values",
        ),
        ({"seeds": (1, 1)}, "seeds=(1, 1) must be one or more different values"),
        ({"learning_rates": (0.0,)}, "learning_rate is 0.0; it must be a number > 0"),
        ({"kinds": ("vsm",)}, "kind='vsm' is unknown"),
        ({"seeds": (-1,)}, "seed is -1; it must be"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(options, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        sweep(BASE, tmp_path / "sweep", **options)
    assert not (tmp_path / "sweep").exists()


def test_torchrun_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="torchrun cannot start a grid of runs; start"):
        sweep(BASE, tmp_path)
