"""Tables of many series: both forms, gaps, and one line for each mistake."""

import numpy as np
import pandas
import pytest

from vssm.forecasting.panel import read_ahead, read_panel


def long_table(num=6, ids=("b", "a")):
    days = pandas.date_range("2024-01-01", periods=num, freq="D")
    return pandas.concat(
        [pandas.DataFrame({"unique_id": id, "ds": days, "y": np.arange(num) + 1.0}) for id in ids],
        ignore_index=True,
    )


def test_long_and_wide_tables_are_one_panel():
    long = long_table()
    wide = long.pivot(index="ds", columns="unique_id", values="y")[["b", "a"]]
    for table in (wide, wide.reset_index(names="date"), wide.reset_index(names="when")):
        panel = read_panel(table)
        assert panel.wide and panel.ids == ["b", "a"] == read_panel(long).ids
        for one, other in zip(panel.series, read_panel(long).series, strict=True):
            assert np.array_equal(one.y, other.y) and one.dates.equals(other.dates)


def test_missing_rows_become_missing_cells_and_series_start_where_they_start():
    long = long_table().drop(index=[2, 6, 7])  # one inside of b, the first two of a
    b, a = read_panel(long.sample(frac=1, random_state=0).sort_index(kind="stable")).series
    assert np.isnan(b.y).tolist() == [False, False, True, False, False, False]
    assert a.dates[0] == pandas.Timestamp("2024-01-03") and len(a.y) == 4
    wide = long.pivot(index="ds", columns="unique_id", values="y")
    assert [len(one.y) for one in read_panel(wide).series] == [4, 6]


@pytest.mark.parametrize("freq", ["h", "D", "B", "W-SUN", "MS", "ME", "QS", "15min"])
def test_frequencies_are_found_and_dates_go_on(freq):
    dates = pandas.date_range("2024-01-31", periods=13, freq=freq)
    panel = read_panel(pandas.DataFrame({"a": np.arange(12.0)}, index=dates[:12]))
    assert panel.next_dates(panel.series[0], 1)[0] == dates[12]


def test_a_frequency_that_does_not_fit_the_dates_is_noted():
    days = pandas.date_range("2024-01-01", periods=4, freq="D")
    note = "^freq='h' leaves 69 of 73 dates without a row; the dates of the table look like 'D'$"
    with pytest.warns(UserWarning, match=note):
        read_panel(pandas.DataFrame({"a": np.arange(4.0)}, index=days), freq="h")


def test_covariates_are_sorted_by_how_they_change():
    table = long_table().assign(price=np.arange(12.0), shop=[1] * 6 + [2] * 6, promo=0.0)
    panel = read_panel(table, future=["promo"])
    assert panel.columns.future == ("promo",)
    assert panel.columns.past == ("price",) and panel.columns.static == ("shop",)
    assert panel.series[1].static.tolist() == [2]
    pandas.testing.assert_frame_equal(
        panel.to_frame()[list(table.columns)], table, check_dtype=False
    )


def changed(name, value, row=3):
    table = long_table()
    table[name] = table[name].astype(object)
    table.loc[row, name] = value
    return table


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            pandas.concat([long_table(), long_table().iloc[[1]]]),
            "'b' has .*2024-01-02.* rows 1 and",
        ),
        (changed("ds", pandas.Timestamp("2024-01-04 07:00")), "'b', row 3: .*07:00.*'D'"),
        (changed("ds", "soon"), "'b', row 3: the date is 'soon'"),
        (changed("y", "many"), r"'b', column 'y', row 3 \(2024-01-04.* 'many', which is text"),
        (changed("y", np.inf), r"'b', column 'y', row 3 .* is inf, which is infinite"),
        (
            changed("y", 1e200),
            r"'b', column 'y', row 3 \(2024-01-04\) is 1e\+200, .* more than 1e\+30",
        ),
        (changed("unique_id", 7).assign(y=np.inf), "'b', column 'y', row 0"),
        (long_table(ids=(3, 4)).assign(y=np.inf), "series 3, column 'y', row 0"),
        (long_table().rename(columns={"y": "sales"}), "no values; name the column of values y"),
        (
            long_table().rename(columns={"unique_id": "shop", "ds": "date"}),
            "column 'shop', row 0 .* 'b', which is text; drop it, or name the columns of a long",
        ),
        (long_table().assign(made=long_table()["ds"]), "column 'made', row 0 .*2024-01-01.* text"),
        (
            long_table().assign(ds=[f"2024-01-0{k % 6 + 1}T00:00+0{k % 2}:00" for k in range(12)]),
            "several offsets from UTC",
        ),
        (pandas.concat([long_table()[["ds", "y"]], long_table()[["y"]]], axis=1), "two columns"),
        (pandas.concat({"x": long_table(), "z": long_table()}, axis=1), "columns have 2 levels"),
        (changed("unique_id", None), "row 3 has no unique_id"),
        (changed("y", None).assign(price="cheap"), "'b', column 'price', row 0 .*'cheap'.* text"),
        (long_table().drop(columns="ds"), "no dates"),
        (long_table().iloc[:0], "no rows"),
        (long_table(2), "give freq"),
        ([1, 2], "df has type list"),
    ],
)
def test_a_mistake_is_named_in_one_line(table, message):
    with pytest.raises(ValueError, match=message) as error:
        read_panel(table)
    assert "\n" not in str(error.value)


def test_a_covariate_is_not_the_series_itself():
    with pytest.raises(ValueError, match="'y' is part of the series"):
        read_panel(long_table(), future=["y"])


def test_other_forms_of_the_same_table_are_read():
    long = long_table()
    one = long[long["unique_id"] == "b"].drop(columns="unique_id")
    categories = pandas.Categorical(long["unique_id"], categories=["a", "b", "closed"])
    for table, ids in [
        (long.set_index(["unique_id", "ds"]), ["b", "a"]),
        (long.set_index("ds"), ["b", "a"]),
        (long.assign(unique_id=categories), ["b", "a"]),
        (long.assign(ds=long["ds"].dt.to_period("D")), ["b", "a"]),
        (long.reset_index(names="Unnamed: 0"), ["b", "a"]),  # from a file with its index
        (one.rename(columns={"ds": "date"}), ["y"]),
        (long.assign(row=np.arange(12.0)), ["b", "a"]),
    ]:
        panel = read_panel(table)
        assert panel.ids == ids and panel.step == "D"
        assert panel.series[0].y.tolist() == [1, 2, 3, 4, 5, 6]
        assert panel.columns.past == (("row",) if "row" in table else ())


def test_a_wide_column_that_turned_to_text_is_named():
    table = pandas.DataFrame(
        {"load": [1.0, 2, 3, 4], "heat": ["1", "2", "?", "4"]},
        index=pandas.date_range("2024", periods=4, freq="D"),
    )
    with pytest.raises(ValueError, match="column 'heat', row 2"):
        read_panel(table)
    assert read_panel(table.drop(index=table.index[2]), "D").series[1].y.tolist()[:2] == [1, 2]


def test_future_covariates_must_cover_the_horizon():
    table = long_table().assign(promo=0.0)
    panel = read_panel(table, future=["promo"])
    days = pandas.date_range("2024-01-07", periods=3, freq="D")
    shared = pandas.DataFrame({"ds": days, "promo": [1.0, 2, 3]})
    for future in (shared, shared.set_index("ds"), shared.set_index("ds").rename_axis("date")):
        assert [one[:, 0].tolist() for one in read_ahead(panel, 3, future)] == [[1, 2, 3]] * 2
    both = pandas.concat([shared.assign(unique_id=id) for id in "ab"])
    assert len(read_ahead(panel, 2, both)) == 2
    assert len(read_ahead(panel, 2, both.set_index(["unique_id", "ds"]))) == 2
    for future, message in [
        (None, "future is missing.*promo"),
        ([1.0, 2, 3], "future has type list"),
        (shared.assign(unique_id="c"), "future of series 'b' has no 'promo' on 2024-01-07"),
        (shared.rename(columns={"promo": "p"}), "future: the table has no column 'promo'"),
        (shared.assign(promo=["1", "?", "1"]), "future: .*column 'promo', row 1 .*'\\?'.* text"),
        (shared.assign(promo=[1.0, np.inf, 3]), "column 'promo', row 1 .* infinite"),
        (both.iloc[[0, 0, 1, 2]], "'a' has the date .* twice, in rows 0 and 1"),
        (shared.iloc[:2], "'b' has no 'promo' on 2024-01-09"),
        (both[both["unique_id"] == "b"], "series 'a' has no 'promo' on 2024-01-07"),
        (shared.assign(promo=[1.0, np.nan, 3]), "no 'promo' on 2024-01-08"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_ahead(panel, 3, future)
    with pytest.raises(ValueError, match="no future_columns"):
        read_ahead(read_panel(long_table()), 3, shared)
