"""The results page shows what goes past the paper, from made-up results, and nothing when there are none."""

import json

import pytest

from tests.test_report import DIALS, PNG
from vssm.results_page import write_page


def make_result(folder, name, metrics, parts=None, **data):
    folder.mkdir(parents=True, exist_ok=True)
    made = {
        "name": name,
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "machine": {"gpu": "a GPU"},
        "command": f"vssm evaluate {name} --dials",
        "config": {"data": {"name": "mnist", **data}, **(parts or {})},
        "metrics": metrics,
    }
    (folder / f"{name}.json").write_text(json.dumps(made))


def rows_of(page):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.read_text().splitlines()
        if line.startswith("|")
    ]


def test_quality_has_a_section_by_data_set(tmp_path):
    folder = tmp_path / "results" / "quality"
    make_result(folder, "mnist_base", {**DIALS, "passes": 1, "generate_ms_b1": 5.25, "train_seconds": 300})
    make_result(folder, "mnist_ssm", {"log_likelihood": 709.0, "fd_sample": 1233.0, "passes": 28})
    make_result(folder, "mnist_binary", {"log_likelihood": -83.5, "nats": 83.5}, binarize=True)
    (folder / "mnist_base.png").write_bytes(PNG)
    page = write_page(tmp_path / "results", tmp_path / "docs" / "results.md")
    text, rows = page.read_text(), rows_of(page)
    assert text.count("## Better than the paper") == 1
    assert text.index("### binarised mnist") != text.index("### mnist")
    assert "## quality/" not in text  # not shown a second time as any result
    head = ["run", "log p(x)", "FD one shot", "FD step by step", "FD W = 14 / 7 / 1", "FD S = 4 / 28"]
    assert [*head, "FD second half", "FD floor", "passes", "ms", "training, s"] in rows
    base = ["mnist_base", "892", "1056", "–", "820 / 545 / 51", "757 / 51", "22", "7", "1", "5.25", "300"]
    assert base in rows
    other = ["mnist_ssm", "709", "–", "1233", "– / – / –", "– / –", "–", "–", "28", "–", "–"]
    assert other in rows
    assert ["run", "log p(x)", "nats"] in rows
    assert ["mnist_binary", "-83.5", "83.5"] in rows
    assert ["in chunks of 14, re-conditioned", "820", "11", "61"] in rows
    assert ["`vssm evaluate mnist_base --dials`", "a GPU", "0123456789ab", "2026-01-02"] in rows
    assert (tmp_path / "docs" / "pictures" / "quality_mnist_base.png").read_bytes() == PNG
    pictures = sorted(path.name for path in (tmp_path / "docs" / "pictures").iterdir())
    assert pictures == ["dials_mnist_base.png", "quality_mnist_base.png"]
    assert all(f"(pictures/{name})" in text for name in pictures)


def test_a_run_is_shown_with_the_command_that_trained_it(tmp_path):
    parts = {"model": {"features": 28, "width": 64}, "train": {"epochs": 3, "optimizer": "muon"}}
    make_result(tmp_path / "results" / "quality", "mnist_mine", {"log_likelihood": 800.0}, parts)
    page = write_page(tmp_path / "results", tmp_path / "results.md")
    trained, scored = next(row[0] for row in rows_of(page) if "vssm train" in row[0]).split(", ")
    assert scored == "`vssm evaluate mnist_mine --dials`"
    options = "--train.epochs 3 --train.optimizer muon --out mnist_mine"
    assert trained == f"`vssm train mnist --model.kind vssm --model.width 64 --model.head gaussian {options}`"


def test_no_section_without_files(tmp_path):
    make_result(tmp_path / "results", "speed", {"ms": 1.0})
    page = write_page(tmp_path / "results", tmp_path / "results.md")
    assert "Better than the paper" not in page.read_text()


def test_damaged_quality_is_named(tmp_path):
    make_result(tmp_path / "results" / "quality", "mnist_base", [1])
    with pytest.raises(ValueError, match=r"mnist_base\.json' is damaged"):
        write_page(tmp_path / "results", tmp_path / "results.md")
    assert not (tmp_path / "results.md").exists()


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("metrics", {"vssm_crps": "low"}, "metric vssm_crps is no number"),
        ("config", None, "config is no JSON object"),
        ("command", 3, "command is no text"),
        ("name", ["forecast"], "name is no text"),
    ],
)
def test_damaged_benchmarks_are_named(part, value, message, tmp_path):
    make_result(tmp_path / "results", "speed", {"ms": 1.0})
    path = tmp_path / "results" / "speed.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), part: value}))
    with pytest.raises(ValueError, match=rf"speed\.json' is damaged: .*{message}.*; allowed: a result file$"):
        write_page(tmp_path / "results", tmp_path / "results.md")
