"""The results page of this repository: results in words, the best in bold, nothing made up."""

import base64
import json
import re

import pytest

from tests.lab.results_page import ROOT, page_text, write_page

DIALS = {
    "log_likelihood": 892.0,
    "fd_one_shot": 1056.0,
    "fd_w14": 820.0,
    "fd_w7": 545.0,
    "fd_w1": 51.0,
    "fd_s4": 757.0,
    "fd_s28": 51.0,
    "fd_prompted": 22.0,
    "fd_floor": 7.0,
    "ms_one_shot": 5.25,
    "ms_w14": 11.0,
    "ms_w14_b256": 61.0,
}
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)


def make_result(folder, name, metrics, parts=None, kind=None, **data):
    folder.mkdir(parents=True, exist_ok=True)
    made = {
        "name": kind or name,
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "machine": {"gpu": "a GPU"},
        "command": f"vssm evaluate {name} --dials",
        "config": {"data": {"name": "mnist", **data}, **(parts or {})},
        "metrics": metrics,
    }
    (folder / f"{name}.json").write_text(json.dumps(made))


def table_rows(text):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def rows_of(page):
    return table_rows(page.read_text())


def test_quality_has_a_section_for_each_data_set(tmp_path):
    folder = tmp_path / "results" / "quality"
    make_result(
        folder, "mnist_base", {**DIALS, "passes": 1, "generate_ms_b1": 5.25, "train_seconds": 300}
    )
    make_result(folder, "mnist_ssm", {"log_likelihood": 709.0, "fd_sample": 1233.0, "passes": 28})
    make_result(folder, "mnist_binary", {"log_likelihood": -83.5, "nats": 83.5}, binarize=True)
    (folder / "mnist_base.png").write_bytes(PNG)
    page = write_page(tmp_path / "results", tmp_path / "docs" / "results.md")
    text, rows = page.read_text(), rows_of(page)
    assert text.count("## Better than the paper") == 1
    assert text.index("### binarised mnist") != text.index("### mnist")
    assert "## quality/" not in text  # not shown a second time as any result
    head = [
        "run",
        "log p(x)",
        "FD one shot",
        "FD step by step",
        "FD W = 14 / 7 / 1",
        "FD S = 4 / 28",
    ]
    assert [*head, "FD second half", "FD floor", "passes", "ms", "training, s"] in rows
    base = [
        "mnist_base",
        "892",
        "1056",
        "–",
        "820 / 545 / 51",
        "757 / 51",
        "22",
        "7",
        "1",
        "5.25",
        "300",
    ]
    assert base in rows
    other = ["mnist_ssm", "709", "–", "1233", "– / – / –", "– / –", "–", "–", "28", "–", "–"]
    assert other in rows
    assert ["run", "log p(x)", "nats"] in rows
    assert ["mnist_binary", "-83.5", "83.5"] in rows
    assert ["in chunks of 14, re-conditioned", "820", "11", "61"] in rows
    origin = ["[quality/mnist_base.json]", "`vssm evaluate mnist_base --dials`"]
    assert [*origin, "a GPU", "0123456789ab", "2026-01-02"] in rows
    assert "\n[quality/mnist_base.json]: ../results/quality/mnist_base.json\n" in text
    assert (tmp_path / "docs" / "pictures" / "quality_mnist_base.png").read_bytes() == PNG
    pictures = sorted(path.name for path in (tmp_path / "docs" / "pictures").iterdir())
    assert pictures == ["dials_mnist_base.png", "quality_mnist_base.png"]
    assert all(f"(pictures/{name})" in text for name in pictures)


def test_quality_shows_the_command_that_trained_a_run(tmp_path):
    parts = {"model": {"features": 28, "width": 64}, "train": {"epochs": 3, "optimizer": "muon"}}
    make_result(tmp_path / "results" / "quality", "mnist_mine", {"log_likelihood": 800.0}, parts)
    page = write_page(tmp_path / "results", tmp_path / "results.md")
    trained, scored = next(row[1] for row in rows_of(page) if "vssm train" in row[1]).split(", ")
    assert scored == "`vssm evaluate mnist_mine --dials`"
    options = "--train.epochs 3 --train.optimizer muon --out mnist_mine"
    assert (
        trained
        == f"`vssm train mnist --model.kind vssm --model.width 64 --model.head gaussian {options}`"
    )


def section(page, heading):
    """Returns the text from a heading to the next of its level or above."""
    level = heading.split()[0]
    lines = page.read_text().splitlines()
    start = lines.index(heading)
    ends = [
        n
        for n, line in enumerate(lines[start + 1 :], start + 1)
        if re.match(rf"#{{1,{len(level)}}} ", line)
    ]
    return "\n".join(lines[start : min(ends, default=len(lines))])


FORECAST = {
    "naive_crps_h96": 0.5,
    "naive_coverage80_h96": 0.95,
    "deepar_crps_h96": 0.4,
    "deepar_coverage80_h96": 0.75,
    "vssm_crps_h96": 0.3,
    "vssm_coverage80_h96": 0.70,
    "vssm_crps_h336": 0.35,
    "vssm_ms_1x200x96": 16.1,
    "prophet_crps_h96": 0.6,
    "vssm_sharpness": 0.125,
}


def test_forecasts_are_one_table_a_data_set(tmp_path):
    make_result(tmp_path / "results" / "forecast", "waves", FORECAST, kind="forecast waves")
    page = write_page(tmp_path / "results", tmp_path / "results.md")
    text = section(page, "### waves")
    coverage, ms = "coverage of the 80 % interval, 96", "ms for 200 paths of 96 steps"
    assert table_rows(text)[:8] == [
        ["model", "CRPS, horizon 96", "CRPS, horizon 336", coverage, ms],
        ["---"] * 5,
        ["vssm", "**0.3**", "0.35", "0.7", "16.1"],  # one time is not the best of anything
        ["DeepAR", "0.4", "–", "**0.75**", "–"],  # nearest to 80 %, not the largest
        ["naive", "0.5", "–", "0.95", "–"],
        ["prophet", "0.6", "–", "–", "–"],
        ["what", "value"],
        ["---", "---"],
    ]
    assert ["`vssm_sharpness`", "0.125"] in table_rows(text)  # not known, not lost
    assert not [row for row in table_rows(text) if row[0] in ("rnn", "transformer", "windows")]
    assert "[forecast/waves.json]" in text


def test_text_is_shown_by_model_and_by_chunk(tmp_path):
    metrics = {"rnn_bits_per_char": 2.5, "rnn_ms": 68.0, "vssm_bits_per_char": 4.5, "vssm_ms": 3.5}
    chunks = {"vssm_bits_per_char_w128": 4.25, "vssm_ms_w128": 3.0, "vssm_bits_per_char_w1": 4.125}
    make_result(tmp_path / "results" / "text", "hamlet", {**metrics, **chunks}, kind="text")
    rows = table_rows(
        section(write_page(tmp_path / "results", tmp_path / "results.md"), "### hamlet")
    )
    assert rows[:4] == [
        ["model", "bits per character", "ms per sequence"],
        ["---"] * 3,
        ["vssm", "4.5", "**3.5**"],
        ["rnn", "**2.5**", "68"],
    ]
    assert ["model", "W = 128", "W = 1"] in rows
    assert ["vssm", "4.25", "4.125"] in rows
    assert ["vssm", "3"] in rows


GENERATE = {
    "vssm_floor_ms_b1_t28": 0.5,
    "tvae_ms_b1_t28": 2.0,
    "vssm_ms_b1_t28": 1.5,
    "vssm_p10_ms_b1_t28": 1.25,
    "vssm_p90_ms_b1_t28": 1.75,
    "vssm_mib_b1_t28": 64.0,
    "vssm_prompted_ms_b1_t28": 3.0,
    "vssm_prompted_p10_ms_b1_t28": 2.5,
    "vssm_prompted_p90_ms_b1_t28": 3.5,
    "vssm_chunk7_ms_b1_t28": 4.0,
    "tvae_ms_b16_t28": 6.0,
    "vssm_ms_b16_t28": None,
    "warmth": 21.5,
}


def test_generation_has_medians_first_and_folds_the_rest(tmp_path):
    settings = {"width": 64, "source": "abc", "notes": {"vssm_ms_b16_t28": "does not fit"}}
    make_result(tmp_path / "results", "generate_mine", GENERATE, settings, kind="generate")
    page = write_page(tmp_path / "results", tmp_path / "results.md")
    text = section(page, "#### a GPU")
    assert "\nWidth 64.\n" in text
    shown, folded = text.split("<details>")[:2]
    assert table_rows(shown) == [
        ["batch x length", "vssm", "tvae"],
        ["---"] * 3,
        ["1 x 28", "**1.5**", "2"],
        ["16 x 28", "–", "6"],
        ["batch x length", "vssm"],
        ["---"] * 2,
        ["1 x 28", "3"],
        ["batch x length", "vssm"],
        ["---"] * 2,
        ["1 x 28", "4"],
        ["what", "value"],
        ["---"] * 2,
        ["`warmth`", "21.5"],
    ]
    cells = [row[1] for row in table_rows(folded) if row[0] == "1 x 28"]
    assert cells == ["1.25 to 1.75", "2.5 to 3.5", "0.5", "64"]
    assert "- does not fit: `vssm_ms_b16_t28`\n" in text
    assert text.count("<details>") == text.count("</details>") == 2


def test_an_older_measurement_shows_what_only_it_has(tmp_path):
    names = ("vssm_ms_b1_t96", "rnn_ms_b1_t96", "vssm_ms_b1_t2880", "rnn_ms_b1_t2880")
    old = dict(zip(names, (2.0, 30.0, 36.0, 900.0), strict=True))
    new = dict(zip(names[:2], (1.5, 31.0), strict=True))
    make_result(tmp_path / "results", "generate_before_mine", old, kind="generate")
    make_result(tmp_path / "results", "generate_mine", new, kind="generate")
    page = write_page(tmp_path / "results", tmp_path / "results.md")
    first, second = section(page, "### Generation").split("#### a GPU")[1:]
    assert ["1 x 96", "**1.5**", "31"] in table_rows(first)
    shown, folded = second.split("<details>\n<summary>Measured again since</summary>")
    assert table_rows(shown) == [
        ["batch x length", "vssm", "rnn"],
        ["---"] * 3,
        ["1 x 2880", "**36**", "900"],
    ]
    assert ["1 x 96", "**2**", "30"] in table_rows(folded)


def test_speed_and_serving_are_in_words(tmp_path):
    scan = {
        "fwd_ms_b1_t8": 1.0,
        "floor_ms_b1_t8": 0.5,
        "floor_bwd_ms_b1_t8": 0.25,
        "mambapy_fwd_ms_b1_t8": 9.0,
    }
    make_result(tmp_path / "results", "scan_mine", {**scan, "bwd_ms_b1_t8": 2.0}, kind="scan")
    rates = {
        "vssm_tokens_per_second": 5.0,
        "rnn_tokens_per_second": 8.0,
        "vssm_tokens_per_second_p10": 4.0,
    }
    make_result(tmp_path / "results", "train_mine", rates, kind="train")
    times = {"vssm_train_ms_t256": 9.0, "ssm_train_ms_t256": 7.0, "vssm_sample_exponent": 0.75}
    make_result(tmp_path / "results", "table1_mine", times, kind="table1")
    served = {"errors": 0, "batching_speedup": 3.5, "ssm_batching_speedup": 19.0, "p50_ms": 650.5}
    make_result(tmp_path / "results", "serve_mine", served, kind="serve")
    page = write_page(tmp_path / "results", tmp_path / "results.md")
    rows = table_rows(section(page, "### Scan"))
    assert [rows[0], rows[2]] == [["batch x length", "vssm", "mambapy"], ["1 x 8", "**1**", "9"]]
    assert ["1 x 8", "0.5", "0.25"] in rows
    rows = table_rows(section(page, "### Training"))
    assert rows[2:4] == [["vssm", "5", "4"], ["rnn", "**8**", "–"]]
    rows = table_rows(section(page, "### The paper's Table 1"))
    assert ["256", "9", "**7**"] in rows
    assert ["vssm", "0.75"] in rows
    rows = table_rows(section(page, "## Serving"))
    assert rows[2:4] == [["vssm", "3.5"], ["ssm", "19"]]
    assert ["median time of an answer, ms", "650.5"] in rows
    assert not re.findall(r"`\w+_(?:ms|per_second)\w*`", page.read_text())


def test_contents_list_all_sections(tmp_path):
    make_result(tmp_path / "results", "speed", {"ms": 1.0})
    make_result(tmp_path / "results", "serve_mine", {"errors": 0}, kind="serve")
    make_result(tmp_path / "results", "generate_mine", {"vssm_ms_b1_t8": 1.0}, kind="generate")
    make_result(tmp_path / "results" / "text", "hamlet", {"rnn_bits_per_char": 2.5}, kind="text")
    make_result(
        tmp_path / "results" / "forecast", "waves", {"rnn_crps": 2.5}, kind="forecast waves"
    )
    make_result(tmp_path / "results" / "quality", "mnist_base", {"log_likelihood": 892.0})
    page = write_page(tmp_path / "results", tmp_path / "results.md")
    text = page.read_text()
    titles = ["Better than the paper", "Forecasting", "Text", "Speed", "Serving", "Other results"]
    assert re.findall(r"^## (.+)", text, re.M) == titles
    assert re.findall(r"^- \[(.+?)\]\(#", text, re.M) == titles
    assert text.index("- [Serving](#serving)") < text.index("\n## ")
    assert "- [Speed](#speed): [Generation](#generation)\n" in text
    assert "- [Other results](#other-results): [speed](#speed-1)\n" in text
    assert ["`ms`", "1"] in rows_of(page)  # unknown, but not lost


SCORES = {"parameters": 2_000_000, "epochs": 5, "learning_rate": 0.01, "log_likelihood": 3.0}
SCORES |= {"partial_log_likelihood": 2.0, "generate_ms_b1": 4.0}
SCORES |= {"prompted_ms_b1": 3.0, "train_seconds": 9.0}


def make_paper(folder, kind, nulls=(), seed=0, **changes):
    """A scored run and one of the grid, with null for some of the metrics."""
    parts = {"model": {"kind": kind}, "train": {"seed": seed}}
    scored = {name: None if name in nulls else value for name, value in SCORES.items()}
    make_result(folder, f"mnist_{kind}_seed{seed}", {**scored, **changes}, parts)
    path = folder / f"mnist_{kind}_seed{seed}.json"
    curve = {"epoch": [1, 5], "validation_elbo": [None, None if "log_likelihood" in nulls else 1.0]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "curve": curve}))
    for rate, loss in ((0.01, None), (0.001, 2.0), (0.1, 3.0)):
        metrics = {"validation_loss": loss, "epochs": 1, "learning_rate": rate}
        make_result(folder / "grid", f"mnist_{kind}_lr{rate}", metrics, parts)


def test_experiments_have_tables_comparisons_and_learning_rates(tmp_path):
    folder = tmp_path / "results" / "paper"
    make_paper(folder, "ssm")
    make_paper(folder, "vssm", log_likelihood=8.0, generate_ms_b1=2.0)
    make_paper(folder, "vssm", seed=1, log_likelihood=10.0, generate_ms_b1=2.0)
    page = write_page(tmp_path / "results", tmp_path / "docs" / "results.md")
    text, rows = page.read_text(), rows_of(page)
    likelihoods = ["9.0 (8.0 to 10.0)", "2.0 (2.0 to 2.0)"]
    times = ["2.00 (2.00 to 2.00)", "3.00 (3.00 to 3.00)", "9 (9 to 9)"]
    assert ["vssm", "2", "2 M", "5", "0.01", *likelihoods, *times] in rows
    ahead = "+6.0 nats in full, +0.0 in the second half"
    assert f"- vssm against ssm: {ahead}; 2.0 times faster to draw a sequence.\n" in text
    assert ["ssm", "1", "3.0", "diverged", "**2.0**"] in rows
    pictures = sorted(path.name for path in (tmp_path / "docs" / "pictures").iterdir())
    assert pictures == ["paper.png", "paper_mnist.png"]
    before = page.read_bytes()
    assert write_page(tmp_path / "results", page).read_bytes() == before

    path = folder / "mnist_vssm_seed0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "commit": "another version"}))
    text = write_page(tmp_path / "results", page).read_text()
    assert f"- vssm against ssm: {ahead}.\n" in text, "times of two versions do not compare"


def test_metrics_that_are_not_finite_are_dashes(tmp_path):
    folder = tmp_path / "results" / "paper"
    make_paper(folder, "ssm")
    make_paper(folder, "vssm", {"log_likelihood"})
    page = write_page(tmp_path / "results", tmp_path / "results.md")
    assert ["vssm", "1", "2 M", "5", "0.01", "–", "2.0", "4.00", "3.00", "9"] in rows_of(page)
    assert "- vssm against ssm: – nats in full, +0.0 in the second half" in page.read_text()
    for kind in ("ssm", "vssm"):
        make_paper(folder, kind, SCORES)
    page = write_page(tmp_path / "results", tmp_path / "results.md")
    assert ["vssm", "1", *["–"] * 5] in rows_of(page)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metrics": {"ms": "low"}}, "metric ms is not a number"),
        ({"metrics": {"ms": True}}, "metric ms is not a number"),
        ({"metrics": [1]}, ""),
    ],
)
def test_damaged_results_are_named(change, message, tmp_path):
    make_paper(tmp_path / "results" / "paper", "ssm")
    path = tmp_path / "results" / "paper" / "mnist_ssm_seed0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=rf"^'{path}' is damaged: .*{message}.*; remove it$"):
        write_page(tmp_path / "results", tmp_path / "results.md")
    assert not (tmp_path / "results.md").exists()


def test_committed_page_is_up_to_date():
    committed = (ROOT / "docs" / "results.md").read_text()
    assert page_text(ROOT / "results", ROOT / "docs") == committed, "run: make docs"
    pictures = re.findall(r"\]\((pictures/[^)]+)\)", committed)
    files = re.findall(r"^\[.+\]: (.+)$", committed, re.M)
    assert pictures and files
    for path in (*pictures, *files):
        assert (ROOT / "docs" / path).is_file(), path
