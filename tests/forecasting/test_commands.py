"""`vssm forecast` and `vssm backtest`: what they write, and one line for each mistake."""

import sys

import numpy as np
import pandas
import pytest

from tests.forecasting.test_forecaster import weeks
from vssm.cli import main
from vssm.forecasting.charts import Fan, draw_fans
from vssm.forecasting.files import write_forecast


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs a command that fails in an empty folder, and returns its one line."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        with pytest.raises(SystemExit, match="2"):
            main(list(words))
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        return message

    return run


def test_the_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    weeks(90).to_csv("shops.csv", index_label="date", sep=";")
    options = ["--horizon", "7", "--max-steps", "3"]
    main(["forecast", "shops.csv", *options, "--save", "own"])
    made = pandas.read_csv("forecast.csv")
    assert made.columns.tolist()[:4] == ["unique_id", "ds", "mean", "0.025"] and len(made) == 14
    main(["forecast", "own", "--path", "shops.csv", "--out", "again.csv"])
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "forecast.csv").read_bytes()
    capsys.readouterr()
    main(["forecast", "own", "--season", "7", "--seed", "1", "--out", "again.csv"])
    note = "note: 'own' keeps the settings of its training and ignores --season, --seed\n"
    assert capsys.readouterr().err == note
    pytest.importorskip("pyarrow")
    main(["forecast", "own", "--quantiles", "0.5", "--out", "own.parquet"])
    assert pandas.read_parquet("own.parquet").columns.tolist()[2:] == ["mean", "0.5"]
    main(["backtest", "shops.csv", "--windows", "2", *options])
    assert pandas.read_csv("backtest.csv")["model"].tolist() == ["vssm", "seasonal naive"]
    names = {"forecast.png", "again.png", "own.png", "backtest.png"}
    assert {path.name for path in tmp_path.glob("*.png")} == names


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "own"),
        ("fill", "own", "--input", "a.npy", "--out", "b.npy"),
        ("evaluate", "own"),
        ("report", "own"),
    ],
)
def test_other_commands_refuse_a_forecaster(words, refused, tmp_path):
    (tmp_path / "own").mkdir()
    for name in ("own/config.json", "own/forecaster.json", "a.npy"):
        (tmp_path / name).write_text("{}")
    line = "'own' is a forecaster, not a run; use it with: vssm forecast own"
    assert refused(*words) == f"vssm: {line}\n"
    assert not (tmp_path / "report.html").exists()


def test_mistakes_in_a_file_are_named(refused, tmp_path):
    (tmp_path / "text.csv").write_text("date,a\n2024-01-01,1\n2024-01-02,x\n2024-01-03,2\n")
    assert "column 'a', row 1" in refused("forecast", "text.csv")
    (tmp_path / "rows.csv").write_text("date,a\n")
    assert "the table has no rows" in refused("backtest", "rows.csv")
    (tmp_path / "empty.csv").write_text("")
    assert "'empty.csv' is not a table" in refused("forecast", "empty.csv")
    assert "'none.csv' does not exist" in refused("forecast", "none.csv")
    assert "must end in .csv or .parquet" in refused("forecast", "rows.csv", "--out", "o.txt")
    assert "has no forecaster.json" in refused("forecast", str(tmp_path))
    (tmp_path / "huge.csv").write_text("date,a\n2024-01-01,1\n2024-01-02,1e308\n2024-01-03,inf\n")
    assert "(2024-01-02) is 1e+308, which is more than 1e+30" in refused("forecast", "huge.csv")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--horizon 0", "horizon is 0; it must be a whole number >= 1"),
        ("--horizon 91", "horizon is 91, and the longest series has 90 rows"),
        ("--samples 0", "samples is 0; it must be a whole number >= 1"),
        ("--future-columns south", "--future is missing; give a table with the dates and south"),
        ("--future weeks.csv", "future is given, but the forecaster has no future_columns"),
        ("--future weeks.csv --future-columns b", "future of series 'a' has no 'b' on 2024-"),
        ("--save weeks.csv", "folder='weeks.csv' is a file or lies below one"),
        ("--save weeks.csv/own", "folder='weeks.csv/own' is a file or lies below one"),
        ("--save run", "folder='run' is a run"),
    ],
)
def test_mistakes_are_found_before_the_training(options, message, refused, tmp_path, monkeypatch):
    weeks(90).to_csv(tmp_path / "weeks.csv", index_label="date")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"model": {}, "train": {}}')
    monkeypatch.delattr("vssm.forecasting.forecaster.train")
    assert message in refused("forecast", "weeks.csv", *options.split())


@pytest.mark.parametrize(
    ("levels", "given"),
    [("0.1 1.5", "1.5"), ("-0.1", "-0.1"), ("nan", "nan"), ("0.5 0.1 0.50", "0.5 twice")],
)
def test_a_wrong_quantile_is_named_before_any_work(levels, given, refused):
    line = refused("forecast", "nowhere", "--path", "nothing.csv", "--quantiles", *levels.split())
    assert line == f"vssm: quantiles has {given}; give numbers from 0 to 1, each once\n"


def test_the_history_is_not_overwritten(refused, tmp_path):
    weeks(30).to_csv(tmp_path / "dates.csv", index_label="date")
    (tmp_path / "link.csv").symlink_to("dates.csv")
    before = (tmp_path / "dates.csv").read_text()
    for path in ("dates.csv", "link.csv"):
        line = refused("forecast", "own", "--path", path, "--out", "dates.csv")
        both = f"path='{path}' and out='dates.csv'"
        assert line == f"vssm: {both} are the same file; use two names\n"
    assert (tmp_path / "dates.csv").read_text() == before and not (tmp_path / "dates.png").exists()


def test_parquet_names_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'vssm\[forecast\]'"):
        write_forecast(pandas.DataFrame({"a": [1.0]}), tmp_path / "a.parquet")


def test_the_legend_of_a_chart_covers_no_line(tmp_path):
    days = pandas.date_range("2024-01-01", periods=24, freq="D")
    paths = np.random.default_rng(0).normal(size=(9, 4))
    fan = Fan("a$", days[:20], np.arange(20.0), [(days[20:], paths)])
    figure = draw_fans([fan], tmp_path / "fan.png")
    assert (tmp_path / "fan.png").stat().st_size > 1000
    (legend,), (axes,) = figure.legends, figure.axes
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["history", "95%", "80%", "50%", "median"]
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
