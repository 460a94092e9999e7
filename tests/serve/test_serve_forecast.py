"""POST /v1/forecast: the answers of a saved `Forecaster`, and one line for bad histories."""

import numpy as np
import pandas
import pytest
from fastapi.testclient import TestClient

from tests.serve.test_serve import wait_until_ready
from tests.serving import body_schema, error, served
from vssm import Forecaster
from vssm.serve.app import create_app
from vssm.serve.models import open_models
from vssm.serve.settings import Settings

OPTIONS = {"horizon": 6, "max_steps": 3, "context": 12, "width": 8, "layers": 1, "progress": False}


def panel(days=60, promo=False):
    """Two series with gaps, as a long table."""
    dates, parts = pandas.date_range("2026-01-01", periods=days, freq="D"), []
    for number, name in enumerate(("a", "b")):
        y = 10 + number + np.sin(np.arange(days))
        y[days // 2] = np.nan
        part = pandas.DataFrame({"unique_id": name, "ds": dates, "y": y})
        parts.append(part.assign(promo=np.arange(days) % 2) if promo else part)
    return pandas.concat(parts, ignore_index=True)


def rows(table):
    table = table.assign(ds=table["ds"].dt.strftime("%Y-%m-%d")).astype(object)
    return table.where(table.notna(), None).to_dict("records")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecasters")
    Forecaster(**OPTIONS).fit(panel()).save(folder / "plain")
    Forecaster(**OPTIONS, future_columns=("promo",)).fit(panel(promo=True)).save(folder / "promo")
    return [str(folder / "plain"), str(folder / "promo")]


@pytest.fixture(scope="module")
def client(folders):
    models, forecasters = open_models(folders)
    assert not models
    app = create_app([served("ssm")], Settings(max_cells=500), forecasters=forecasters)
    with TestClient(app, raise_server_exceptions=False) as client:
        wait_until_ready(client)
        yield client


def post(client, **body):
    reply = client.post("/v1/forecast", json=body)
    assert reply.status_code == 200, reply.text[:300]
    return reply.json()


def test_quantiles_are_those_of_the_forecaster(client, folders):
    history = panel(40)
    expected = Forecaster.load(folders[0]).predict(history, 50, (0.1, 0.9))
    reply = post(client, history=rows(history), samples=50, quantiles=[0.1, 0.9])
    made = pandas.DataFrame(reply["forecast"])
    assert reply["model"] == "plain" and list(made) == ["unique_id", "ds", "mean", "0.1", "0.9"]
    assert made["ds"].iloc[0] == "2026-02-10T00:00:00"
    np.testing.assert_allclose(made[["mean", "0.9"]], expected[["mean", "0.9"]], rtol=1e-5)
    single = [{"ds": row["ds"], "y": row["y"]} for row in rows(history[:40])]
    assert len(post(client, history=single)["forecast"]) == 6, "one series needs no unique_id"


def test_paths_are_those_of_the_forecaster(client, folders):
    history = panel(40)
    expected = Forecaster.load(folders[0]).predict_samples(history, 5)
    made = post(client, history=rows(history), samples=5, paths=True)["forecast"]
    assert [row["unique_id"] for row in made] == ["a"] * 6 + ["b"] * 6
    paths = np.array([row["paths"] for row in made])  # (series times steps, paths)
    np.testing.assert_allclose(paths.reshape(2, 6, 5), np.moveaxis(expected, 1, 2), rtol=1e-5)


def test_covariates_of_the_future_are_taken(client):
    table = panel(46, promo=True)
    last = table["ds"].max() - pandas.Timedelta(days=6)
    history, future = table[table["ds"] <= last], table[table["ds"] > last]
    body = {"model": "promo", "history": rows(history)}
    made = post(client, **body, future=rows(future.drop(columns="y")))["forecast"]
    assert len(made) == 12 and made[0]["ds"] == "2026-02-10T00:00:00"
    assert "future is missing" in error(client.post("/v1/forecast", json=body), 422)["message"]


def test_forecasters_are_listed_and_explained(client, folders):
    listed = client.get("/v1/models").json()["forecasters"]
    assert listed == [
        {"name": "plain", "horizon": 6, "future_columns": []},
        {"name": "promo", "horizon": 6, "future_columns": ["promo"]},
    ]
    assert set(body_schema(client, "forecast")["examples"][0]) == {"history", "quantiles"}
    with TestClient(create_app([], forecasters=open_models(folders)[1])) as alone:
        wait_until_ready(alone)
        assert len(post(alone, history=rows(panel(40)))["forecast"]) == 12
        refused = error(alone.post("/v1/generate", json={}), 404)
        assert "only forecasters are served" in refused["message"]


HISTORY = [{"ds": f"2026-01-{day:02}", "y": 1.0 + day % 3} for day in range(1, 30)]


def changed(**cells):
    return [*HISTORY[:-1], {**HISTORY[-1], **cells}]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 422, "history is missing"),
        ({"history": []}, 422, "history has no column 'ds'"),
        ({"history": [[1, 2]]}, 422, "history is not allowed: input should be a list of rows"),
        ({"history": {"ds": []}}, 422, "history is not allowed: input should be a list of rows"),
        ({"history": [{"ds": "2026-01-01"}]}, 422, "history has no column 'y'"),
        ({"history": changed(y=[1])}, 422, "row 28: y should be a number, a text or null"),
        ({"history": changed(y="many")}, 422, "y"),
        ({"history": changed(ds="soon")}, 422, "soon"),
        ({"history": changed(ds=None)}, 422, "row 28: the date is missing"),
        ({"history": changed(ds="2026-01-01")}, 422, "twice"),
        ({"history": changed(ds="9999-01-01")}, 422, ""),
        ({"history": changed(ds="2199-01-01")}, 422, "spans more than 500 steps"),
        ({"history": changed(unique_id={"a": 1})}, 422, "unique_id should be a number"),
        ({"history": HISTORY * 20}, 422, "580 rows are too many; send at most 500"),
        ({"history": HISTORY, "samples": 0}, 422, "samples=0 is not allowed"),
        ({"history": HISTORY, "samples": 10**6}, 422, "ask for at most 8000"),
        ({"history": HISTORY, "quantiles": [2]}, 422, "quantiles has 2"),
        ({"history": HISTORY, "quantiles": ["x"]}, 422, "quantiles"),
        ({"history": HISTORY, "future": HISTORY}, 422, "future is given"),
        ({"history": HISTORY, "model": "ssm"}, 404, "model='ssm' is not a forecaster; use plain,"),
        ({"history": HISTORY, "colour": 1}, 422, "field 'colour' is unknown"),
    ],
)
def test_bad_input_is_one_line(client, body, status, words):
    refused = error(client.post("/v1/forecast", json=body), status)
    assert words in refused["message"]


def test_infinite_values_are_refused(client):
    kind = {"content-type": "application/json"}
    body = b'{"history": [{"ds": "2026-01-01", "y": 1e999}]}'
    error(client.post("/v1/forecast", content=body, headers=kind), 400)
