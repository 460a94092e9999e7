"""The page shows the files, marks the best values, escapes all text and survives damage."""

import base64
import json
import re
from html.parser import HTMLParser

import pytest

from vssm.evaluation.report import report
from vssm.evaluation.report.chart import draw_chart

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Checks that tags nest, and collects texts by tag, attributes and rows of tables."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.rows, self.text = [], [], [], {}
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.setdefault(self.open[-1] if self.open else "", []).append(data)
        if self.open and self.open[-1] in ("td", "th", "strong") and self.rows:
            self.rows[-1].append(f"*{data}*" if self.open[-1] == "strong" else data)


def places(attributes):
    """The points of an SVG path."""
    return [tuple(map(float, pair)) for pair in re.findall(r"[ML] (\S+) (\S+)", attributes["d"])]


def read(path):
    return Page(path.read_text(encoding="utf-8"))


def make_run(folder, kind="vssm", metrics=None, head="gaussian", **files):
    folder.mkdir(parents=True)
    config = {
        "format": 1,
        "model": {
            "kind": kind,
            "width": 96,
            "layers": 2,
            "latents": 12,
            "classes": 16,
            "head": head,
        },
        "data": {"name": "digits", "dir": None},
        "train": {"epochs": 3, "batch": 64, "learning_rate": 0.002, "seed": 0},
    }
    log = [
        {"step": s, "epoch": s / 10, "split": split, "loss": 9.0 - s, "kl": 1.0 + s}
        | {"reconstruction": 2.0 * s, "partial": 0.0}
        for s in range(5)
        for split in ("train", "valid")
    ]
    contents = {
        "config.json": json.dumps(config),
        "eval.json": json.dumps(
            {"command": "vssm evaluate x", "metrics": metrics or {"log_likelihood": 1.5}}
        ),
        "log.jsonl": "".join(json.dumps(line) + "\n" for line in log),
        "samples.png": PNG,
    } | files
    for name, content in contents.items():
        if content is not None:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_comparison_marks_the_best(tmp_path):
    runs = [
        make_run(
            tmp_path / "a",
            "vssm",
            {"log_likelihood": 866.04, "fd_w4": 504.0, "generate_ms_b1": 5.5},
        ),
        make_run(
            tmp_path / "b", "ssm", {"log_likelihood": 709.0, "fd_w4": 74.0, "generate_ms_b1": 94.0}
        ),
        make_run(tmp_path / "c", "rnn", {"log_likelihood": None, "fd_floor": 7.0}),
    ]
    page = read(report(runs, out=tmp_path / "page" / "report.html"))
    assert ["a", "b", "c"] in page.rows
    assert ["log p(x)", "*866.04*", "709", "–"] in page.rows
    assert ["in chunks of 4, re-conditioned", "504", "*74*", "–"] in page.rows
    assert ["whole sequence, batch 1", "*5.5*", "94", "–"] in page.rows
    assert ["floor: training images", "–", "–", "7"] in page.rows


def test_only_runs_of_one_task_are_compared(tmp_path):
    runs = [
        make_run(tmp_path / "a", metrics={"log_likelihood": 866.0}),
        make_run(tmp_path / "b", metrics={"log_likelihood": -90.0}, head="bernoulli"),
    ]
    page = read(report(runs, out=tmp_path / "report.html"))
    assert "strong" not in page.text
    captions = [text for text in page.text["caption"] if text.startswith("Test set")]
    assert captions == ["Test set of digits, gaussian head", "Test set of digits, bernoulli head"]


def charts(page):
    """The titles of the charts."""
    return [a["alt"] for tag, a in page.tags if tag == "img" and "svg" in a["src"]]


def test_a_run_opens_with_its_pictures_and_curves(tmp_path):
    run = make_run(tmp_path / "mine", **{"completed.png": PNG})
    page = read(report([run], out=tmp_path / "report.html"))
    assert page.text["h2"] == ["Samples", "Training", "Test set", "Runs"]
    images = [a for tag, a in page.tags if tag == "img" and "png" in a["src"]]
    alts = [f"{name} of mine (digits, gaussian head)" for name in ("samples", "completed")]
    assert [image["alt"] for image in images] == alts
    assert base64.b64decode(images[0]["src"].removeprefix("data:image/png;base64,")) == PNG
    bound = "digits, gaussian head: bound on log p(x), validation, nats a sequence"
    assert charts(page) == [bound, "loss, nats a sequence", "KL, nats a sequence"]
    for row in (["model", "vssm"], ["width", "96"], ["latents", "12 × 16"]):
        assert row in page.rows
    assert ["learning rate", "0.002"] in page.rows


def test_runs_of_one_task_share_a_chart(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    page = read(
        report([*runs, make_run(tmp_path / "c", head="bernoulli")], out=tmp_path / "r.html")
    )
    assert len(charts(page)) == 2 and page.text["li"][-3:] == ["a", "b", "c"]


def test_page_is_accessible_and_loads_nothing(tmp_path):
    path = report([make_run(tmp_path / "a"), make_run(tmp_path / "b")], tmp_path / "r.html")
    page, text = read(path), path.read_text()
    assert ("html", {"lang": "en"}) in page.tags
    assert [tag for tag, _ in page.tags].count("h1") == 1
    assert all("scope" in attributes for tag, attributes in page.tags if tag == "th")
    assert all(attributes.get("alt") for tag, attributes in page.tags if tag == "img")
    targets = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    assert targets == {f"#{attributes['id']}" for tag, attributes in page.tags if tag == "section"}
    identities = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identities) == len(set(identities))
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not re.search(r"https?://|@import|url\((?!#)|href=\"(?!#)", text)
    assert str(tmp_path) not in text


EVIL = "<script>alert('x')</script>\"'&\ud800"


def test_all_text_is_escaped(tmp_path):
    config = {
        "model": {"kind": EVIL, "head": EVIL, EVIL: [EVIL]},
        "data": {"name": EVIL},
        "train": {"epochs": EVIL},
    }
    evaluation = {"commit": EVIL, "machine": {"cpu": EVIL}, "metrics": {EVIL: EVIL, "elbo": 1}}
    run = make_run(
        tmp_path / "<b>run&'",
        **{"config.json": json.dumps(config), "eval.json": json.dumps(evaluation)},
    )
    page = read(report([run, run], tmp_path / "report.html"))
    assert not {"script", "b", "i", "u"} & {tag for tag, _ in page.tags}
    assert any("<script>alert('x')</script>\"'&" in text for text in page.text["td"])
    assert {"<b>run&'", "<b>run&'′"} <= set(page.text["th"])


@pytest.mark.parametrize("name", ["eval.json", "config.json", "log.jsonl", "samples.png"])
def test_a_page_shows_what_is_there(name, tmp_path):
    page = read(report([make_run(tmp_path / "mine", **{name: None})], out=tmp_path / "report.html"))
    titles = {"eval.json": "Test set", "log.jsonl": "Training", "samples.png": "Samples"}
    missing = {titles[name]} if name in titles else set()
    assert set(page.text["h2"]) == {"Samples", "Training", "Test set", "Runs"} - missing


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": '{"model":'}, "config.json' is damaged: Expecting value"),
        ({"eval.json": b"\x80\x04\x95pickle"}, "eval.json' is damaged"),
        ({"eval.json": "[1]"}, "eval.json' is damaged: it is not a JSON object"),
        ({"log.jsonl": "3\n{}\n"}, "log.jsonl' line 1 is damaged"),
        ({"samples.png": PNG[:-9]}, "samples.png' is damaged: it is not a whole PNG"),
        ({"samples.png": b"<svg onload='alert(1)'/>"}, "samples.png' is damaged"),
    ],
)
def test_damaged_files_are_named(files, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        report([make_run(tmp_path / "mine", **files)], out=tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


DIALS = {
    "fd_one_shot": 1056.0,
    "fd_w14": 820.0,
    "fd_w7": 545.0,
    "fd_w1": 51.0,
    "fd_s4": 757.0,
    "fd_s28": 51.0,
    "fd_prompted": 22.0,
    "fd_floor": 7.0,
    "log_likelihood": 892.0,
    "ms_one_shot": 5.5,
    "ms_w14": 11.0,
    "ms_w7": 21.0,
    "ms_w1": 150.0,
    "ms_s4": 20.0,
    "ms_s28": 140.0,
    "ms_one_shot_b256": 30.5,
    "ms_w14_b256": 61.0,
}


def test_dials_are_rows_of_the_table(tmp_path):
    path = report([make_run(tmp_path / "mine", metrics=DIALS)], out=tmp_path / "report.html")
    page = read(path)
    for row in (
        ["in chunks of 7, re-conditioned", "545"],
        ["in 28 passes", "51"],
        ["in chunks of 14, re-conditioned, batch 1", "11"],
        ["in chunks of 14, re-conditioned, batch 256", "61"],
        ["floor: training images", "7"],
    ):
        assert row in page.rows


def test_odd_values_are_shown_as_they_are(tmp_path):
    odd = {"fd_one_shot": None, "fd_w2": 0.0, "ms_w2": "x", "ms_w99999999999": 1.0}
    page = read(report([make_run(tmp_path / "mine", metrics=odd)], out=tmp_path / "report.html"))
    assert ["one shot", "–"] in page.rows
    assert ["in chunks of 2, re-conditioned, batch 1", "x"] in page.rows


def test_failed_write_leaves_the_old_page(tmp_path, monkeypatch):
    run = make_run(tmp_path / "mine")
    path = report([run], out=tmp_path / "report.html")
    before = path.read_bytes()

    def full_disk(path, content):
        raise OSError("No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full_disk)
    with pytest.raises(OSError, match="No space left"):
        report([run], out=path)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "report.html"]


def test_nothing_to_report(tmp_path):
    with pytest.raises(ValueError, match="nothing to report; give one or more run"):
        report([], out=tmp_path / "report.html")
    run, out = make_run(tmp_path / "mine"), tmp_path / "made" / "report.html"
    (tmp_path / "bare").mkdir()
    for name, what in (("lost", "is not a folder"), ("bare", "holds no run")):
        with pytest.raises(ValueError, match=f"{name}' {what}; give run folders"):
            report([run, tmp_path / name], out=out)
    assert not out.parent.exists()


def test_suffix_may_be_in_capitals(tmp_path):
    path = report([make_run(tmp_path / "mine")], out=tmp_path / "Report.HTML")
    assert path.name == "Report.HTML" and "samples of mine" in path.read_text()


def test_a_page_does_not_replace_a_file_of_a_run(tmp_path, capsys):
    from vssm.cli import main

    config = make_run(tmp_path / "mine") / "config.json"
    before = config.read_bytes()
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(config.parent), "--out", str(config)])
    line = f"vssm: out='{config}' is not allowed; use a name that ends in .html or .htm\n"
    assert capsys.readouterr().err == line and config.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to report; give one or more run folders"),
        (["nowhere"], "'nowhere' is not a folder; give run folders, which vssm train writes"),
        (["."], "'.' holds no run; give run folders, which vssm train writes"),
    ],
)
def test_command_without_anything_to_report(arguments, message, tmp_path, monkeypatch, capsys):
    from vssm.cli import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["report", *arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"vssm: {message}") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def drawn(*arguments):
    """The chart's size, and the points of its lines, by stroke."""
    svg = draw_chart(*arguments).content.decode()
    width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', svg).groups())
    paths = re.findall(r'<path d="([^"]*)" clip-path[^>]*style="([^"]*)"', svg)
    lines = [(re.search("stroke: (#[0-9a-f]+)", style)[1], path) for path, style in paths]
    return width, height, {colour: places({"d": path}) for colour, path in lines}


@pytest.mark.parametrize("points", [[(1, 5), (2, 5)], [(k, 1e6 / k**4) for k in range(1, 2000)]])
def test_points_lie_inside_the_chart(points):
    width, height, lines = drawn("t", "x", {"line": points})
    line = lines["#3b8ad0"]
    assert 2 <= len(line) <= 2000
    assert all(0 <= x <= width for x, _ in line)
    # The first twentieth of a loss may be cut.
    assert sum(0 <= y <= height for _, y in line) >= 0.9 * len(line)
    assert line == sorted(line)  # by x


def test_single_points_are_drawn_and_colours_repeat():
    chart = draw_chart("t", "x", {str(index): [(1, index)] for index in range(8)})
    assert chart.legend["0"] == chart.legend["6"] != chart.legend["5"]
    assert chart.content.count(b"<use ") >= 8
