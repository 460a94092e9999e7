"""A run is kept whole: what it scored, how its training went, what its samples look like."""

import json
import runpy
from pathlib import Path

import pytest
from matplotlib.image import imread

from tests.evaluation.test_evaluate import DIGITS, WAVES, make_run
from tests.lab.results_page import write_page
from vssm.cli import main
from vssm.runs.results import write_result

keep_result = runpy.run_path(str(Path(__file__).parents[2] / "experiments" / "keep_result.py"))[
    "keep_result"
]
LOG = [
    {
        "step": 10,
        "epoch": 1,
        "split": "valid",
        "loss": 9.0,
        "reconstruction": -5.0,
        "kl": 2.0,
        "best": True,
    },
    {"step": 20, "epoch": 2, "split": "train", "loss": 1.0, "reconstruction": -1.0, "kl": 0.0},
    {
        "step": 20,
        "epoch": 2,
        "split": "valid",
        "loss": 7.0,
        "reconstruction": -3.0,
        "kl": 2.5,
        "best": True,
    },
    {"step": 30, "epoch": 3, "split": "valid", "loss": None, "reconstruction": None, "kl": None},
]


@pytest.fixture
def evaluated(tmp_path):
    run = make_run(tmp_path / "run", "vssm", DIGITS)
    config = json.loads((run / "config.json").read_text()) | {"train": {"learning_rate": 0.002}}
    (run / "config.json").write_text(json.dumps(config))
    scored = {
        "command": "vssm evaluate run",
        "config": config,
        "metrics": {"elbo": 3.0},
        "name": "run",
    }
    write_result(run / "eval.json", scored)
    return run


def test_result_joins_evaluation_and_training(evaluated, tmp_path):
    (evaluated / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LOG))
    (evaluated / "meta.json").write_text('{"seconds": 12.5}')
    path = tmp_path / "results" / "quality" / "digits_base.json"
    keep_result(evaluated, path, "cpu")
    made = json.loads(path.read_text())
    assert made["name"] == "digits_base"
    assert made["command"] == "vssm evaluate run"
    assert made["metrics"] == {
        "elbo": 3.0,
        "learning_rate": 0.002,
        "train_seconds": 12.5,
        "epochs": 3,
        "validation_loss": 7.0,
        "validation_elbo": -5.5,
        "best_epoch": 2,
    }
    # Three rows of one shot, chunks of two, single steps and completions, with lines between.
    assert imread(path.with_suffix(".png")).shape[:2] == (12 * 10, 16 * 10)


def test_torn_log_is_read_and_damaged_files_are_named(evaluated, tmp_path):
    path, log = tmp_path / "digits_base.json", evaluated / "log.jsonl"
    lines = [json.dumps(line) for line in LOG]
    log.write_text("\n".join([*lines, lines[0][:20]]))  # killed while it wrote
    keep_result(evaluated, path, "cpu")
    assert json.loads(path.read_text())["metrics"]["validation_loss"] == 7.0
    for damaged in (
        lines[1][:20],
        "7",
        lines[1].replace("kl", "kn"),
    ):
        log.write_text("\n".join([lines[0], damaged, *lines[2:]]))
        with pytest.raises(ValueError, match=r"log.jsonl' line 2 is damaged; remove that line"):
            keep_result(evaluated, path, "cpu")
    log.unlink()
    (evaluated / "meta.json").write_text('{"seconds"')
    with pytest.raises(ValueError, match=r"meta.json' is damaged: "):
        keep_result(evaluated, path, "cpu")


def test_model_without_a_log_is_kept(evaluated, tmp_path):
    keep_result(evaluated, tmp_path / "digits_base.json", "cpu")
    made = json.loads((tmp_path / "digits_base.json").read_text())
    assert made["metrics"] == {"elbo": 3.0, "learning_rate": 0.002}


def test_the_results_page_shows_what_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "my waves", "tvae", WAVES)
    main(["evaluate", "my waves", "--quick", "--dials"])
    keep_result("my waves", "results/quality/waves_tvae.json")
    made = json.loads((tmp_path / "results/quality/waves_tvae.json").read_text())
    assert made["command"] == "vssm evaluate 'my waves' --quick --dials"
    assert made["metrics"]["passes"] == 1
    assert not (tmp_path / "results/quality/waves_tvae.png").exists()  # no images
    text = write_page("results", "results.md").read_text()
    assert "--out 'my waves'" in text
    assert "| in 7 passes |" in text
    assert "dials_waves_tvae.png" not in text  # no distances, no curves


def test_run_without_evaluation_is_not_kept(tmp_path):
    run = make_run(tmp_path / "run", "vssm", DIGITS)
    with pytest.raises(ValueError, match=r"has no eval\.json; measure the run first"):
        keep_result(run, tmp_path / "a.json")
    assert not (tmp_path / "a.json").exists()
