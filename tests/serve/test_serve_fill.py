"""POST /v1/fill: the answers of `vssm.fill`, however they are batched and cut."""

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

import vssm
from tests.serve.test_serve import wait_until_ready
from tests.serving import IMAGE, error, results_of, served
from vssm.sampling import anypart
from vssm.serve.app import create_app
from vssm.serve.calls import fill_gaps

ANY = {"known": "any", "window": 4, "levels": 2, "latents": 4, "width": 32}
GAPS = [[0.5, None, 0.25], [None, None, None], [1, 0, None], [0.1, 0.2, 0.3], [None, 1, 1]]


@pytest.fixture(scope="module")
def models():
    return [
        served("vssm", "image", meta=IMAGE, **ANY),
        served("vssm", "letters", "categorical", **ANY),
        served("vssm", "labels", given=1, **ANY),
        served("ssm"),
    ]


@pytest.fixture(scope="module")
def client(models):
    with TestClient(create_app(models)) as client:
        wait_until_ready(client)
        yield client


def post(client, **body):
    reply = client.post("/v1/fill", json=body)
    assert reply.status_code == 200, reply.text[:300]
    return reply.json()


@pytest.mark.parametrize("options", [{}, {"num": 3, "passes": 3, "seed": 5, "observe": "sample"}])
def test_answers_are_those_of_the_package(client, models, options):
    x = torch.tensor(np.array(GAPS, float), dtype=torch.float32)[None]
    expected = vssm.fill(models[0].model, x, **options).reshape(-1, 5, 3)
    reply = post(client, x=GAPS, **options)
    made = np.array(reply["x"], np.float32)
    np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-5)
    known = ~x[0].isnan().numpy()
    assert (made[:, known] == x[0].numpy()[known]).all(), "bit for bit"
    assert (reply["model"], reply["text"]) == ("image", None)


def test_the_order_is_that_of_the_passes(client, monkeypatch):
    orders = []

    def record(*given):
        orders.append(order_of_passes(*given))
        return orders[-1]

    order_of_passes = anypart.order_of_passes
    monkeypatch.setattr(anypart, "order_of_passes", record)
    reply = post(client, x=GAPS, num=2, passes=3, seed=2)
    np.testing.assert_array_equal(reply["order"], orders[-1][:2, :5])
    known = np.array([[value is not None for value in row] for row in GAPS])
    for order in reply["order"]:
        assert (np.array(order) == -1).tolist() == known.tolist()
        assert set(np.array(order)[~known]) <= {0, 1, 2}


def test_text_and_tokens_are_filled(client):
    text = post(client, model="letters", x="ab__e_", passes=2)
    (made,) = text["text"]
    assert (made[:2], made[4], len(made)) == ("ab", "e", 6) and set(made) <= set("abcde")
    tokens = post(client, model="letters", x=[0, 1, None, None, 4, None], passes=2)
    assert tokens["x"] == text["x"]


def test_models_with_given_columns_are_served(client):
    x = [[None, None, 1.0]] * 4
    made = np.array(post(client, model="labels", x=x)["x"])
    assert made.shape == (1, 4, 3) and (made[..., 2] == 1).all()
    refused = error(client.post("/v1/fill", json={"model": "labels", "x": [[None] * 3] * 5}), 422)
    assert "the last 1 features of x are given" in refused["message"] and refused["param"] == "x"
    for route, body in (("generate", {}), ("observe", {"x": x}), ("observe", {"x": [[0, 0]]})):
        refused = error(client.post(f"/v1/{route}", json={"model": "labels", **body}), 422)
        assert "use POST /v1/fill, or another model: image, letters, ssm" in refused["message"]
        assert refused["param"] == "model"


def test_the_default_is_the_first_model_that_can_do_what_is_asked(models):
    with TestClient(create_app([models[2], models[3], models[0]])) as client:
        wait_until_ready(client)
        assert client.post("/v1/generate", json={"length": 2}).json()["model"] == "ssm"
        assert client.post("/v1/observe", json={"x": [[0, 0, 0]]}).json()["model"] == "ssm"
        assert post(client, x=[[None, None, 1.0]])["model"] == "labels"


def test_merged_and_cut_requests_give_the_results_of_single_ones(models, monkeypatch):
    one = models[0]
    x, known = torch.rand(5, 6, 3), torch.rand(5, 6, 3) < 0.5

    def requests():
        for seed in range(3):
            yield fill_gaps(one, torch.full((5,), seed), torch.arange(5), x, known, passes=2)

    merged = results_of([one], requests())
    assert {done.rows for done in merged} == {15}
    monkeypatch.setattr(one, "cells", 24)  # two sequences in a call
    (cut,) = results_of([one], list(requests())[:1])
    assert cut.rows == 1
    torch.testing.assert_close(cut.x, merged[0].x)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"model": "ssm", "x": GAPS}, "model", "trained with --model.known any"),
        ({"x": [[1, 2, 3]]}, "x", "nothing is unknown in x"),
        ({}, "x", "x is missing"),
        ({"x": []}, "x", "x is empty"),
        ({"x": [[1, None]]}, "x", "x has shape (1, 1, 2); it must be (batch, length, 3)"),
        ({"x": [[1, "2", None]]}, "x", "nested lists of numbers"),
        ({"x": "a_"}, "x", "x is text"),
        ({"model": "letters", "x": "a_z"}, "x", "outside the vocabulary"),
        ({"model": "letters", "x": [0, None, 0.5]}, "x", "does not hold tokens"),
        ({"model": "letters", "x": [0, None, 7]}, "x", "0 to 4"),
        ({"x": [[1e39, None, 0]]}, "x", "x "),
        ({"x": GAPS, "passes": 0}, "passes", "greater than or equal to 1"),
        (
            {"x": GAPS, "passes": 100_000},
            "passes",
            "100000 passes over 1 times 5 steps are too many; use at most 13107",
        ),
        ({"x": GAPS, "num": 257}, "num", "at most 256"),
        ({"x": GAPS, "keep": "server"}, "keep", "field 'keep' is unknown"),
    ],
)
def test_refusals_name_the_field(client, body, param, words):
    refused = error(client.post("/v1/fill", json=body), 422)
    assert refused["param"] == param
    assert words in refused["message"]
