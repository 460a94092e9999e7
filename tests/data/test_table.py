"""Tables are read from CSV, .npy and Parquet files as people have them; damage is named."""

import gzip
import io
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.opening import refused, series, write_csv
from vssm.data import DataConfig, open_data
from vssm.data.table import read_table

DATES = [f"2020-01-{1 + k // 24:02} {k % 24:02}:00" for k in range(24 * 28)]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            (5, "2020-13-01 05:00"),
            ("row 5", "'date'", "'2020-13-01 05:00' is not a date", "ISO 8601"),
        ),
        ((5, "01/02/2020"), ("row 5", "is not a date")),
        ((5, ""), ("row 5", "'' is not a date")),
        ((5, "9999-12-31T20:00-05:00"), ("row", "9999-12-31T20:00-05:00'")),
        ((5, DATES[4]), ("row 5", "04:00' is there twice", "--series.time none")),
        ((5, DATES[2]), ("row 5", "'2020-01-01 02:00' comes after '2020-01-01 04:00'")),
    ],
)
def test_bad_dates_are_named(tmp_path, change, parts):
    rows = [[d, k] for k, d in enumerate(DATES)]
    rows[change[0]][0] = change[1]
    path = write_csv(tmp_path / "a.csv", rows, header=["date", "a"])
    refused(series(path, context=4, horizon=2), path, *parts)
    assert open_data(series(path, context=4, horizon=2, time="none")).meta.columns == ("a",)
    refused(series(path, time="when"), "no column of dates 'when'", "'date'")


@pytest.mark.filterwarnings("ignore:.* left out")
@pytest.mark.parametrize(
    ("cells", "found"),
    [
        (DATES, "when"),
        ([*DATES[:5], "soon", *DATES[6:]], None),
        ([*DATES[:5], DATES[4], *DATES[6:]], None),
        (["word"] * len(DATES), None),
    ],
)
def test_dates_under_another_name_are_found_if_all_are_in_order(tmp_path, cells, found):
    rows = [
        [word, cell, k]
        for k, (word, cell) in enumerate(zip("ab" * len(DATES), cells, strict=False))
    ]
    path = write_csv(tmp_path / "a.csv", rows, header=["word", "when", "a"])
    meta = open_data(series(path, context=4, horizon=2)).meta
    assert (read_table(path).time, meta.columns) == (found, ("a",))


@pytest.mark.parametrize("kind", ["csv", "us.parquet", "ns.parquet"])
def test_dates_between_seconds_are_kept(tmp_path, kind):
    dates = np.datetime64("2024-01-01", "ms") + 100 * np.arange(90)
    path = tmp_path / f"a.{kind}"
    if kind == "csv":
        write_csv(path, [[d, k] for k, d in enumerate(dates.astype(str))], header=["date", "a"])
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        own = dates.astype(f"datetime64[{kind[:2]}]")
        parquet.write_table(pyarrow.table({"date": own, "a": np.arange(90.0)}), path)
    times = read_table(path).times
    assert times.dtype == "datetime64[us]" and (times == dates).all()
    assert read_table(path).time == "date"
    if kind == "csv":
        write_csv(
            path, [[d, k] for k, d in enumerate(dates[[0, 1, 1]].astype(str))], header=["date", "a"]
        )
        refused(series(path), "row 2", "'2024-01-01T00:00:00.100' is there twice")


def test_duplicate_column_names_are_refused(tmp_path):
    path = write_csv(tmp_path / "a.csv", [[k, -k] for k in range(40)], header=["a", "a"])
    refused(series(path, context=4, horizon=2), path, "two columns called 'a'")


@pytest.mark.filterwarnings("ignore:.* dates are uneven")
def test_dates_with_offsets_are_compared_in_utc(tmp_path):
    rows = [
        ["2020-01-01T00:00:00+02:00", 1],
        ["2019-12-31T23:00:00Z", 2],
        *[[f"2020-02-{d:02}", d] for d in range(1, 29)],
    ]
    path = write_csv(tmp_path / "a.csv", rows, header=["time", "a"])
    assert read_table(path).time == "time"


TABLES = {
    "plain.csv": "a,b\n1,2\n3,4\n",
    "headerless.csv": "1,2\n3,4\n",
    "dates.csv": "date,a,b\n2016-07-01 00:00:00,1,2\n2016-07-01 01:00:00,3,4\n",
    "headerless_dates.csv": "2016-07-01,1,2\n2016-07-02,3,4\n",
    "numeric_time.csv": "timestamp,a,b\n20160701,1,2\n20160702,3,4\n",
    "excel.csv": "\ufeffa;b\r\n1;2\r\n\r\n3;4\r\n",
    "tabs.tsv": "a\tb\n1\t2\n3\t4\n",
    "names.csv": 'place,"a, quoted",b,empty\nx,1,2,\ny,3,4,\n',
    "spaces.txt": " a , b \n 1 , 2 \n 3 , 4 \n",
}


@pytest.mark.filterwarnings("ignore:.* left out")
@pytest.mark.parametrize("name", TABLES)
def test_csv_dialects(tmp_path, name):
    (tmp_path / name).write_text(
        TABLES[name] + TABLES[name].splitlines(keepends=True)[-1] * 20, newline=""
    )
    data = open_data(series(tmp_path / name, context=1, horizon=1, scale="none", time="none"))
    assert data.train.batch([0])[0].tolist() == [[1, 2], [3, 4]]
    expected = {
        "headerless.csv": ("0", "1"),
        "headerless_dates.csv": ("1", "2"),
        "names.csv": ("a, quoted", "b"),
    }
    assert data.meta.columns == expected.get(name, ("a", "b"))


@pytest.mark.parametrize(
    ("first", "rows", "names"),
    [
        ("date,2019,2020", "2024-01-{:02d},{},{}", ("2019", "2020")),
        ("date,0,OT", "2024-01-{:02d},{},{}", ("0", "OT")),
        (",0,1", "{},{},{}", ("0", "1")),
        ('date,"load; MW",b', "2024-01-{:02d},{},{}", ("load; MW", "b")),
        ("1,2,3", "{},{},{}", ("0", "1", "2")),
        ("2024/01/01,1,2", "2024-01-{:02d},{},{}", ("1", "2")),  # another date, no word
    ],
)
def test_a_header_may_have_numbers(first, rows, names, tmp_path):
    lines = [rows.format(k, k, k * k) for k in range(1, 29)]
    (tmp_path / "a.csv").write_text("\n".join([first, *lines]))
    options = series(tmp_path / "a.csv", context=3, horizon=2, fill="zero")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert open_data(options).meta.columns == names


@pytest.mark.parametrize(
    ("header", "row", "left_out"),
    [
        ("t;v", "{k};0,{k}", "'v'"),
        ("t,v", '{k},"1,{k}"', "'v'"),
        ("t,place,v", "{k},x,{k}%", "'place', 'v'"),
        ("t,v", "{k},", "'v'"),
        ("t,v", "{k},inf", "'v'"),
    ],
)
def test_columns_that_are_left_out_are_noted(tmp_path, header, row, left_out):
    path = tmp_path / "a.csv"
    path.write_text("\n".join([header, *(row.format(k=k) for k in range(30))]))
    note = f"a.csv: columns without numbers are left out: {left_out}; numbers need a decimal point"
    with pytest.warns(UserWarning, match=note):
        data = open_data(series(path, context=2, horizon=1))
    assert data.meta.columns == ("t",)
    open_data(
        series(path, context=2, horizon=1, columns=("t",))
    )  # others are not wanted, and no news


def test_columns_that_are_left_out_by_their_name_are_noted(tmp_path):
    values = np.random.default_rng(0).normal(size=(60, 2))
    (tmp_path / "a.csv").write_text("\n".join(["index,vol", *(f"{a},{b}" for a, b in values)]))
    with pytest.warns(
        UserWarning, match="column 'index' of numbers is left out because of its name"
    ):
        open_data(series(tmp_path / "a.csv", context=3, horizon=2))


def test_dates_give_no_note(tmp_path):
    rows = [[f"2020-01-{k:02}", k] for k in range(1, 29)]
    for name in ("date", "when"):
        path = write_csv(tmp_path / "a.csv", rows, header=[name, "a"])
        for time in (None, name, "none"):
            open_data(series(path, context=2, horizon=1, time=time))


def test_uneven_dates_are_noted(tmp_path):
    days = [f"2020-0{m}-{d:02}" for m in (1, 2) for d in range(1, 29) if d % 7]
    path = write_csv(tmp_path / "a.csv", [[d, k] for k, d in enumerate(days)], header=["date", "a"])
    with pytest.warns(
        UserWarning,
        match=r"a.csv: dates are uneven: 2020-01-08\S* comes right after 2020-01-06",
    ):
        open_data(series(path, context=2, horizon=1))
    months = [f"{y}-{m:02}-01" for y in range(2010, 2014) for m in range(1, 13)]
    even = [[d, k] for k, d in enumerate(months)]
    open_data(series(write_csv(path, even, header=["date", "a"]), context=2, horizon=1))
    write_csv(path, even[:7] + even[8:], header=["date", "a"])
    with pytest.warns(UserWarning, match=r"2010-09-01\S* comes right after 2010-07-01"):
        open_data(series(path, context=2, horizon=1))


def test_csv_in_another_encoding_is_read_or_refused(tmp_path):
    path = write_csv(tmp_path / "a.csv", [[k, -k] for k in range(200)], header=["a", "b"])
    text = path.read_text().replace("b", "température", 1)
    path.write_bytes(text.encode("latin-1"))
    columns = open_data(series(path, context=4, horizon=2)).meta.columns
    assert columns == ("a", "temp\ufffdrature")
    path.write_bytes(text.encode("utf-16"))
    refused(series(path), path, "has zero bytes, as UTF-16 has; save the file as UTF-8")


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_csv_gives_back_every_number(tmp_path_factory, data):
    width = data.draw(st.integers(1, 4))
    number = st.floats(-1e6, 1e6, width=32)
    values = np.array(
        data.draw(
            st.lists(st.lists(number, min_size=width, max_size=width), min_size=20, max_size=30)
        )
    )
    path = write_csv(tmp_path_factory.mktemp("csv") / "a.csv", values.tolist())
    opened = open_data(series(path, context=1, horizon=1, scale="none"))
    assert np.array_equal(
        opened.train.batch(slice(None))[:, 0],
        values[: int(0.7 * len(values)) - 1].astype(np.float32),
    )


def test_columns_are_chosen_by_name(tmp_path):
    rows = [[f"2020-01-{k:02}", k, 10 * k, 100 * k] for k in range(1, 29)]
    path = write_csv(tmp_path / "a.csv", rows, header=["date", "HUFL", "HULL", "OT"])
    data = open_data(series(path, columns=("OT", "HUFL"), context=2, horizon=1, scale="none"))
    assert data.meta.columns == ("OT", "HUFL") and data.train.batch([0])[0, 0].tolist() == [100, 1]
    refused(
        series(path, columns=("HUFLL",)),
        path,
        "'HUFLL'",
        "choose from 'HUFL', 'HULL', 'OT' (did you mean 'HULL'?)",
    )
    refused(series(path, columns=("OT", "OT")), "series.columns", "name 'OT' twice")
    refused(series(path, columns=("date",)), "'date'", "choose from 'HUFL', 'HULL', 'OT'")


def test_columns_without_names_are_numbered(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(90.0).reshape(30, 3) * [np.nan, 1, 1])
    data = open_data(series(tmp_path / "a.npy", columns=("1",), context=2, horizon=1, scale="none"))
    assert data.train.batch([0])[0, 0].tolist() == [1]
    refused(
        series(tmp_path / "a.npy", columns=("0",)),
        "no column of numbers '0'",
        "choose from '1', '2'",
    )


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ("cannot be read: it is empty",)),
        ("\n\n", ("cannot be read: it is empty",)),
        ("a,b\n", ("no rows",)),
        ("a,b\nx,y\n", ("no column of numbers",)),
        ("date\n1\n2\n", ("besides date", "--series.columns")),
        ("a,b\n1,2\n3\n", ("row 1", "'b'", "missing")),
        ("a,b\n1,2\n3,4,5\n", ("cannot be read: Expected 2 fields in line 3, saw 3",)),
        ("a,b\n1,2\n3,-1e308\n", ("row 1", "'b'", "-1e+308", "use numbers up to 1e+30")),
        ("a,b\n1,2,3\n3,4,5\n", ("cannot be read", "header")),
        ("a,b\n1,2\n3,oops\n", ("row 1", "'b'", "'oops' is not a number", "leave the cell empty")),
        ("a\n" + "1\n" * 150, ("150 rows", "105", "96 + 96 = 192")),
        ("a\n" + "x" * 200000, ("no column of numbers",)),
    ],
)
def test_bad_csv_is_named(tmp_path, content, parts):
    path = tmp_path / "a.csv"
    path.write_text(content)
    refused(series(path), path, *parts)


@pytest.mark.parametrize(
    ("closed", "part"), [("none", "EOF inside string"), ('6"', "is not a number")]
)
def test_an_unclosed_quote_is_refused(tmp_path, closed, part):
    notes = {100: '"5 in', 250: closed}
    lines = [f"{k},{notes.get(k, '1')},{-k}" for k in range(300)]
    (tmp_path / "a.csv").write_text("\n".join(["a,note,b", *lines]))
    refused(series(tmp_path / "a.csv", context=4, horizon=2), "a.csv", part)


@pytest.mark.filterwarnings("ignore:.* left out")
def test_cells_in_quotes_hold_commas_and_quotes(tmp_path):
    notes = ['5" pipe', "a, b", '"', 'say ""x"", "y"', ""] * 8
    rows = [[k, note, str(-k)] for k, note in enumerate(notes)]
    path = write_csv(tmp_path / "a.csv", rows, header=["a", 'note, "quoted"', "b"])
    path.write_text(path.read_text().replace(",-3\n", ', "-3"\n'))  # spaces may come before a quote
    data = open_data(series(path, context=1, horizon=1, scale="none"))
    assert data.meta.columns == ("a", "b") and data.train.batch([3])[0].tolist() == [
        [3, -3],
        [4, -4],
    ]


def test_series_needs_a_path():
    refused(DataConfig(name="series"), "series.path")
    refused(
        series("nowhere.csv"), "found no nowhere.csv in the place given", "timeseries", "--data-dir"
    )


@pytest.mark.parametrize("packed", [False, True])
def test_npy_series(tmp_path, packed):
    values = np.arange(90, dtype=np.int32).reshape(30, 3)
    buffer = io.BytesIO()
    np.save(buffer, values)
    path = tmp_path / ("a.npy.gz" if packed else "a.npy")
    path.write_bytes(gzip.compress(buffer.getvalue()) if packed else buffer.getvalue())
    data = open_data(series(path, context=2, horizon=1, scale="none", columns=("2",)))
    assert data.train.batch([1])[0, :, 0].tolist() == [5, 8, 11]
    np.save(tmp_path / "b.npy", np.zeros((3, 3, 3)))
    refused(series(tmp_path / "b.npy"), "b.npy", "(3, 3, 3)")
    np.save(tmp_path / "b.npy", np.zeros((0, 3)))
    refused(series(tmp_path / "b.npy"), "b.npy has no rows")
    path.write_bytes(path.read_bytes()[:100])
    refused(series(path), path)


def test_parquet_needs_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    refused(series(tmp_path / "a.parquet"), "pyarrow", "pip install 'vssm[forecast]'")


@pytest.mark.filterwarnings("ignore:.* left out")
def test_parquet_series(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    stamps = np.arange(30).astype("datetime64[s]")
    columns = {"when": stamps, "a": np.arange(30), "b": [None, *range(1, 30)], "c": ["x"] * 30}
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    refused(series(path), "row 0", "'b'", "--series.fill")
    data = open_data(series(path, fill="zero", context=2, horizon=1, scale="none"))
    assert data.meta.columns == ("a", "b") and data.train.batch([1])[0].tolist() == [
        [1, 1],
        [2, 2],
        [3, 3],
    ]
    path.write_bytes(path.read_bytes()[:-9])
    refused(series(path), path, "cannot be read")


@pytest.mark.parametrize("name", ["a.csv", "headerless.csv", "a.parquet"])
def test_columns_of_true_and_false_are_ones_and_zeros(tmp_path, name):
    path, open_flags = tmp_path / name, [k % 3 == 0 for k in range(30)]
    if path.suffix == ".csv":
        rows = [
            [k, str(flag), "" if k == 1 else str(flag).lower()] for k, flag in enumerate(open_flags)
        ]
        write_csv(path, rows, header=["a", "open", "gap"] if name == "a.csv" else None)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        gap = [None if k == 1 else flag for k, flag in enumerate(open_flags)]
        parquet.write_table(pyarrow.table({"a": range(30), "open": open_flags, "gap": gap}), path)
    data = open_data(series(path, fill="previous", context=2, horizon=2, scale="none"))
    assert data.meta.columns == (
        ("0", "1", "2") if name == "headerless.csv" else ("a", "open", "gap")
    )
    assert data.train.batch([0])[0].tolist() == [[0, 1, 1], [1, 0, 1], [2, 0, 0], [3, 1, 1]]


def test_columns_of_parquet_that_are_no_plain_numbers(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    columns = {"id": [2**60 + 1] * 30, "a": range(30), "parts": [[1, 2]] * 30}
    parquet.write_table(pyarrow.table(columns), path)
    with pytest.warns(UserWarning, match=r"are left out: 'parts'"):
        data = open_data(series(path, context=2, horizon=1, scale="none"))
    assert data.meta.columns == ("id", "a") and data.train.batch([0])[0, 0].tolist() == [2.0**60, 0]
    days = pyarrow.array([f"2024-05-{day:02}" for day in range(1, 31)], pyarrow.string_view())
    parquet.write_table(pyarrow.table({"date": days, "a": range(30)}), path)
    assert read_table(path).time == "date"
