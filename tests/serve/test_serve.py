"""The server in this process: answers equal the package's, however they are batched and cut."""

import asyncio
import gc
import json
import math
import re
import threading
import time

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from tests.conftest import KINDS, sequences, small_model
from tests.serving import IMAGE, body_schema, error, results_of, served
from vssm import State, generate, observe, save
from vssm.data import Meta
from vssm.engine import Engine
from vssm.serve.app import create_app
from vssm.serve.calls import Call, compute, make_steps
from vssm.serve.errors import Refused
from vssm.serve.models import Served, open_models
from vssm.serve.run import exposed_settings, read_secret
from vssm.serve.settings import Settings
from vssm.serve.states import Store
from vssm.serve.worker import Worker

RIGHT = "correct-horse-battery"
NAMES = sorted(KINDS, reverse=True)  # vssm comes first


@pytest.fixture(scope="module")
def models():
    wide = [served(kind, width=64) for kind in NAMES]
    levels = served("vssm", "levels", width=64, levels=2, latents=4)
    any_part = served("vssm", "any", width=64, levels=2, latents=4, known="any", window=4)
    return [
        *wide,
        levels,
        any_part,
        served("vssm", "letters", "categorical"),
        served("vssm", "image", meta=IMAGE),
    ]


@pytest.fixture(scope="module")
def client(models):
    with TestClient(create_app(models)) as client:
        wait_until_ready(client)
        yield client


def wait_until_ready(client):
    for _ in range(600):
        if client.get("/readyz").status_code == 200:
            return
        time.sleep(0.05)
    raise AssertionError("not ready")


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


def post(client, path, **body):
    reply = client.post(f"/v1/{path}", json=body)
    assert reply.status_code == 200, reply.text[:300]
    return reply.json()


def array(reply):
    return np.array(reply["x"], np.float32)


def close(given, expected):
    np.testing.assert_allclose(given, np.asarray(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [*KINDS, "levels", "any"])
def test_answers_are_those_of_the_package(client, models, kind):
    model = next(one.model for one in models if one.name == kind)
    prompt = sequences(model, 1, 3)
    reply = post(client, "generate", model=kind, num=3, length=5, seed=4, prompt=prompt[0].tolist())
    close(array(reply), generate(model, num=3, length=5, seed=4, prompt=prompt.expand(3, -1, -1)).x)
    assert (reply["model"], reply["position"], reply["text"]) == (kind, 8, None)
    more = post(client, "resume", model=kind, resume=reply["resume"], length=2)
    whole = generate(model, num=3, length=7, seed=4, prompt=prompt.expand(3, -1, -1)).x
    close(np.concatenate([array(reply), array(more)], 1), whole)


@pytest.mark.parametrize("kind", [*KINDS, "levels", "any"])
@pytest.mark.parametrize("case", ["plain", "prompt", "state", "recondition", "read"])
def test_merged_jobs_give_the_results_of_jobs_alone(models, kind, case):
    one = next(one for one in models if one.name == kind)
    if case == "recondition" and not one.parallel:
        pytest.skip("for models that generate in parallel")

    def jobs():
        torch.manual_seed(3)
        for number, rows in enumerate((1, 3, 1, 7, 2)):
            seed = torch.full((rows,), number)
            row = torch.arange(rows)
            x = sequences(one.model, rows, {"read": 3, "prompt": 1}.get(case, 2))
            given = {"prompt": x} if case in ("prompt", "read") else {}
            if case == "state":
                given = {"state": observe(one.model, x, seed=number)}
            if case == "recondition":
                given = {"prompt": x, "chunk": 2, "recondition": True}
            yield make_steps(one, seed, row, 0 if case == "read" else 5, **given)

    merged = results_of([one], jobs())
    assert {done.rows for done in merged} == {14}
    for calls, rows, together in zip(jobs(), (1, 3, 1, 7, 2), merged, strict=True):
        (alone,) = results_of([one], [calls])
        assert alone.rows == rows
        if together.x is not None:
            close(together.x, alone.x)
        for given, expected in zip(together.state.leaves(), alone.state.leaves(), strict=True):
            close(given, expected)


def test_jobs_that_differ_are_not_merged(models):
    one = models[0]
    seed = torch.zeros(1, dtype=torch.int64)
    options = [
        {},
        {"temperature": 0.5},
        {"observe": "sample"},
        {"chunk": 2},
        {"chunk": 2, "recondition": True},
    ]
    requests = [make_steps(one, seed, seed, 4, **option) for option in options]
    requests.append(make_steps(one, seed, seed, 5))
    assert [done.rows for done in results_of([one], requests)] == [1] * 6
    requests = [make_steps(one, seed, seed, 4) for _ in range(3)]
    assert [done.rows for done in results_of([one], requests, Settings(max_rows=1))] == [1] * 3


def test_a_worker_that_closes_takes_no_more(models):
    async def submit():
        worker, seed = Worker([models[0]]), torch.zeros(1, dtype=torch.int64)
        worker.close()
        with pytest.raises(Refused, match="stopping"):
            worker.submit(make_steps(models[0], seed, seed, 4))

    asyncio.run(submit())


def test_a_batch_has_at_most_so_many_rows(models):
    """A job that does not fit waits; a job that never fits is a batch of its own."""
    one = models[0]
    seeds = [torch.zeros(rows, dtype=torch.int64) for rows in (2, 2, 1, 6, 3)]
    requests = [make_steps(one, seed, seed, 4) for seed in seeds]
    done = results_of([one], requests, Settings(max_rows=4))
    assert [each.rows for each in done] == [4, 4, 4, 6, 4]


def test_one_bad_job_does_not_hurt_the_others_and_a_cancelled_one_is_dropped(models):
    one, seed = models[0], torch.zeros(1, dtype=torch.int64)

    async def run():
        worker = Worker([one])
        good = [worker.submit(make_steps(one, seed, seed, 4)) for _ in range(2)]
        bad = worker.submit(make_steps(one, seed, torch.zeros(2, dtype=torch.int64), 4))
        gone = worker.submit(make_steps(one, seed, seed, 4))
        gone.cancel()
        worker.close()
        await worker.run()
        assert all([(await future).x.shape == (1, 4, 3) for future in good])
        with pytest.raises(Refused) as refused:
            await bad
        assert refused.value.status_code in (422, 500)

    asyncio.run(run())


def test_a_worker_that_fails_ends_all_jobs_and_takes_no_more(models, monkeypatch, caplog):
    seed, called = torch.zeros(1, dtype=torch.int64), []

    def warm_up(served):
        raise RuntimeError("no such kernel")

    async def run():
        worker = Worker([models[0]])
        worker.on_failure = lambda: called.append(worker.failure)
        waiting, gone = (worker.submit(make_steps(models[0], seed, seed, 4)) for _ in range(2))
        gone.cancel()
        await worker.run()
        with pytest.raises(Refused, match=re.escape(message)) as refused:
            await waiting
        assert (refused.value.status_code, refused.value.type) == (503, "failed")
        with pytest.raises(Refused, match=re.escape(message)):
            worker.submit(make_steps(models[0], seed, seed, 4))

    monkeypatch.setattr(Served, "warm_up", warm_up)
    message = "computing failed (RuntimeError); the server's log says why"
    asyncio.run(run())
    assert called == [message]
    assert "no such kernel" in caplog.text


def stop(*given, **options):
    raise SystemExit  # no error of a request, but the end of the worker


def test_the_jobs_of_a_batch_end_when_the_worker_fails_in_it(models, monkeypatch):
    seed = torch.zeros(1, dtype=torch.int64)
    monkeypatch.setattr("vssm.serve.worker.compute", stop)
    requests = [make_steps(models[0], seed, seed, length) for length in (4, 4, 5)]
    for refused in results_of(models[:1], requests):
        assert isinstance(refused, Refused) and "SystemExit" in refused.detail


def test_a_server_whose_worker_failed_says_so(monkeypatch):
    app = create_app([served("vssm")])
    with TestClient(app) as client:
        wait_until_ready(client)
        monkeypatch.setattr(Engine, "generate", stop)
        for reply in (
            client.post("/v1/generate", json={"length": 4}),  # waits while it fails
            client.post("/v1/generate", json={"length": 4}),
            client.post("/v1/generate", json={"length": 4, "stream": True}),
            client.post("/v1/observe", json={"x": [[0, 0, 0]]}),
            client.get("/readyz"),
            client.get("/healthz"),
        ):
            told = error(reply, 503)
            assert told["type"] == "failed"
            assert told["message"] == "computing failed (SystemExit); the server's log says why"


def test_a_bug_in_a_pass_is_a_500(monkeypatch, caplog):
    with TestClient(create_app([served("vssm")])) as client:
        wait_until_ready(client)
        monkeypatch.setattr(Engine, "generate", lambda *given, **options: 1 / 0)
        assert error(client.post("/v1/generate", json={"length": 4}), 500)["type"] == "internal"
        (name, last), *_ = events(client.post("/v1/generate", json={"stream": True}).text)
        assert (name, last["error"]["type"]) == ("error", "internal")
    assert "ZeroDivisionError" in caplog.text


def events(text):
    pairs = re.findall(r"event: (\w+)\ndata: (.*)\n\n", text)
    return [(name, json.loads(data)) for name, data in pairs]


@pytest.mark.parametrize(
    ("model", "options", "pieces"),
    [
        ("vssm", {}, [7]),
        ("vssm", {"chunk": 3}, [3, 3, 1]),
        ("tvae", {"chunk": 3, "recondition": True}, [3, 3, 1]),
        ("ssm", {"chunk": 4}, [4, 3]),
        ("transformer", {}, [1] * 7),
    ],
)
def test_streamed_chunks_join_to_the_whole(client, model, options, pieces):
    ask = {"model": model, "num": 2, "length": 7, "seed": 2, **options}
    reply = client.post("/v1/generate", json={**ask, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, (last, done) = events(reply.text)
    assert last == "done"
    assert [np.array(data["x"]).shape[1] for _, data in chunks] == pieces
    assert [data["from"] for _, data in chunks] == [sum(pieces[:i]) for i in range(len(pieces))]
    whole = post(client, "generate", **ask)
    close(np.concatenate([array(data) for _, data in chunks], 1), array(whole))
    assert done["position"] == 7
    close(
        array(post(client, "resume", resume=done["resume"], length=2)),
        array(post(client, "resume", resume=whole["resume"], length=2)),
    )


@pytest.mark.parametrize(("kind", "bites"), [("ssm", {"chunk": 1}), ("vssm", {"chunk": 3})])
def test_characters_of_several_bytes_are_whole_in_a_stream(kind, bites):
    meta = Meta(name="bytes", features=256, length=8, suggested_head="categorical")
    model = small_model(kind, "categorical", features=256).eval()
    out = (model.stack if kind == "ssm" else model.decoder).out
    with torch.no_grad():  # nothing but the two bytes of é, in any order
        out.weight.zero_()
        out.bias.fill_(-1e4)
        out.bias[[0xC3, 0xA9]] = 0.0
    ask = {"num": 2, "length": 40, "seed": 3, "observe": "sample"}
    with TestClient(create_app([Served("bytes", model, meta)])) as client:
        wait_until_ready(client)
        whole = post(client, "generate", **ask)
        *chunks, _ = events(client.post("/v1/generate", json={**ask, "stream": True, **bites}).text)
    joined = ["".join(data["text"][row] for _, data in chunks) for row in range(2)]
    assert joined == whole["text"] and all("é" in text for text in joined)


def test_a_stream_goes_on_from_chunk_to_chunk_where_no_state_is_kept(client):
    ask = {"model": "vssm", "num": 2, "length": 7, "seed": 2, "chunk": 3}
    *chunks, (_, done) = events(
        client.post("/v1/generate", json={**ask, "stream": True, "keep": "none"}).text
    )
    assert done["resume"] is None and done["position"] == 7
    made = np.concatenate([array(data) for _, data in chunks], 1)
    close(made, array(post(client, "generate", **ask)))


@pytest.mark.parametrize("kind", ["vssm", "vrnn"])
def test_sequences_that_follow_data_draw_latents_of_their_own(client, models, kind):
    model = next(one.model for one in models if one.name == kind)
    x = torch.rand(1, 5, 3)
    place = post(client, "observe", model=kind, x=x.tolist(), num=4, seed=3)["resume"]
    made = array(post(client, "resume", resume=place, length=6, observe="sample"))
    expected = generate(model, num=4, length=6, prompt=x, seed=3, observe="sample").x
    close(made, expected.numpy())
    one = post(client, "observe", model=kind, x=x.tolist())["resume"]
    refused = client.post("/v1/resume", json={"resume": one, "num": 4, "length": 2})
    assert (
        refused.status_code == 422
        and "would share the latents" in refused.json()["error"]["message"]
    )
    more = {"x": x.tolist(), "resume": place, "num": 3}
    assert client.post("/v1/observe", json=more).json()["error"]["param"] == "num"


@pytest.fixture(scope="module")
def small_pieces(models):
    """Yields a client of a server whose pieces have at most 60 cells, and their list."""
    copies, pieces = [Served(one.name, one.model, one.meta) for one in models], []
    for one in copies:
        one.cells = 60

    def watch(batch):
        read, made = batch[0].inputs[2], batch[0].options["length"]
        read = 0 if read is None else read.shape[1]
        pieces.append((sum(call.rows for call in batch), read, made))
        return compute(batch)

    with pytest.MonkeyPatch.context() as patch, TestClient(create_app(copies)) as client:
        patch.setattr("vssm.serve.worker.compute", watch)
        wait_until_ready(client)
        yield client, pieces


DIALS = [{}, {"chunk": 25}, {"chunk": 25, "recondition": True}, {"chunk": 3, "recondition": True}]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, dials) for kind in ("vssm", "tvae", "levels") for dials in DIALS]
    + [("any", dials) for dials in DIALS[:2]]
    + [(kind, {}) for kind in ("ssm", "transformer", "rnn", "vrnn")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_pieces_are_bounded_and_join_to_what_one_call_gives(
    small_pieces, models, kind, options, stream
):
    client, pieces = small_pieces
    pieces.clear()
    one = next(one for one in models if one.name == kind)
    prompt = sequences(one.model, 5, 31)
    ask = {
        "model": kind,
        "length": 55,
        "seed": 6,
        "prompt": prompt.tolist(),
        "stream": stream,
        **options,
    }
    expected = generate(one.model, length=55, seed=6, prompt=prompt, **options)
    reply = client.post("/v1/generate", json=ask)
    if stream:
        *chunks, (_, done) = events(reply.text)
        close(np.concatenate([array(data) for _, data in chunks], 1), expected.x)
        if "chunk" in options:
            assert all(len(data["x"][0]) <= options["chunk"] for _, data in chunks)
    else:
        done = reply.json()
        close(array(done), expected.x)
    largest = 5 * options["chunk"] if options.get("recondition") else 60  # a chunk is not divided
    assert all(rows * (read + made) <= max(60, largest) for rows, read, made in pieces)
    assert done["position"] == 86
    more = post(client, "resume", resume=done["resume"], length=5)
    close(array(more), generate(one.model, length=5, state=expected.state).x)


def test_a_chunk_that_would_take_too_long_is_refused(small_pieces):
    client, _ = small_pieces
    ask = {"model": "vssm", "num": 10, "length": 97, "recondition": True}
    refused = error(client.post("/v1/generate", json=ask), 422)
    assert refused["message"] == (
        "10 times 97 steps are too many to recondition at once; use a chunk of at most 96"
    )
    assert array(post(client, "generate", **ask, chunk=96)).shape == (10, 97, 3)


@pytest.mark.parametrize("kind", [*KINDS, "levels", "any"])
def test_data_are_read_in_bounded_pieces(small_pieces, models, kind):
    client, pieces = small_pieces
    pieces.clear()
    model = next(one.model for one in models if one.name == kind)
    x = sequences(model, 4, 50)
    place = post(client, "observe", model=kind, x=x.tolist(), seed=2)
    assert [rows * read for rows, read, _ in pieces] == [60, 60, 60, 20]
    expected = generate(model, length=4, state=observe(model, x, seed=2))
    close(array(post(client, "resume", resume=place["resume"], length=4)), expected.x)


def test_a_batch_counts_rows_times_steps(models, monkeypatch):
    one = models[0]
    monkeypatch.setattr(one, "cells", 60)
    seed = torch.zeros(1, dtype=torch.int64)
    requests = [make_steps(one, seed, seed, 25) for _ in range(5)]
    assert [done.rows for done in results_of([one], requests)] == [2, 2, 2, 2, 1]


async def submit(worker, calls):
    return worker.submit(calls)


def test_a_client_that_leaves_is_dropped_between_two_pieces_of_its_prompt(small_pieces):
    client, pieces = small_pieces
    pieces.clear()
    worker, seed = client.app.state.worker, torch.zeros(1, dtype=torch.int64)
    one = worker.models[0]
    calls = make_steps(one, seed, seed, 0, sequences(one.model, 1, 200_000))
    future = client.portal.call(submit, worker, calls)
    wait_for(lambda: len(pieces) > 3)
    assert client.portal.call(future.cancel)
    wait_for(lambda: not worker.scheduler.jobs)
    assert len(pieces) < 3000


def test_requests_that_time_out_leave_nothing_behind(models):
    """No reference cycle keeps states alive until the next garbage collection."""
    one = next(one for one in models if one.name == "ssm")
    with TestClient(create_app([one], Settings(timeout=0.1))) as client:
        wait_until_ready(client)
        gc.collect()
        gc.disable()

        def held():
            return sum(type(thing) in (Call, Refused, State) for thing in gc.get_objects())

        before = held()
        try:
            for _ in range(3):
                error(client.post("/v1/generate", json={"length": 4096}), 504)
                client.post("/v1/generate", json={"length": 4096, "stream": True})
            deadline = time.monotonic() + 5
            while (
                held() > before and time.monotonic() < deadline
            ):  # the last piece may still be computed
                time.sleep(0.05)
            assert held() == before
        finally:
            gc.enable()


def test_a_place_can_be_resumed_many_times_and_forked(client):
    first = post(client, "generate", length=3, seed=5)
    twice = [array(post(client, "resume", resume=first["resume"], length=4)) for _ in range(2)]
    assert np.array_equal(*twice)
    fork = array(post(client, "resume", resume=first["resume"], length=4, num=3))
    assert fork.shape == (3, 4, 3)
    assert not np.array_equal(fork[0], fork[1])
    other = array(post(client, "resume", resume=first["resume"], length=4, seed=9))
    assert not np.array_equal(other, twice[0])
    assert post(client, "generate", keep="none")["resume"] is None


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1])
def test_seeds_are_those_of_python(client, models, seed):
    close(
        array(post(client, "generate", length=4, seed=seed)),
        generate(models[0].model, length=4, seed=seed).x,
    )


def test_what_is_left_of_a_sequence_is_the_default_and_nothing_is_refused():
    models = [served("vssm", meta=IMAGE), served("ssm", meta=IMAGE), served("rnn")]
    with TestClient(create_app(models)) as client:
        for name in ("vssm", "ssm"):
            first = post(client, "generate", model=name, length=4)
            rest = post(client, "resume", resume=first["resume"])
            assert array(rest).shape == (1, 2, 3) and rest["position"] == 6
            full = {"model": name, "prompt": [[0] * 3] * 6}
            for route, ask in (("resume", {"resume": rest["resume"]}), ("generate", full)):
                refused = error(client.post(f"/v1/{route}", json=ask), 422)
                assert refused["param"] == "length"
                assert refused["message"] == (
                    "6 steps are known, and training sequences have 6; give length, 1 or more"
                )
                assert array(post(client, route, **ask, length=1)).shape == (1, 1, 3)
        first = post(client, "generate", model="rnn")  # how long its data are is not known
        assert array(post(client, "resume", resume=first["resume"])).shape == (1, 28, 3)


def test_observed_data_are_read_before_what_follows(client, models):
    model = models[0].model
    x = sequences(model, 2, 5)
    first = post(client, "observe", x=x[:, :3].tolist(), seed=3)
    second = post(client, "observe", x=x[:, 3:].tolist(), resume=first["resume"])
    assert (first["position"], second["position"]) == (3, 5)
    close(
        array(post(client, "resume", resume=second["resume"], length=4)),
        generate(model, length=4, prompt=x, seed=3).x,
    )
    for route, ask in (("observe", {"x": x.tolist()}), ("resume", {})):
        wrong = {**ask, "resume": first["resume"], "model": models[1].name}
        refused = error(client.post(f"/v1/{route}", json=wrong), 422)
        assert refused["param"] == "model"
        assert f"is not the model of resume; use {models[0].name!r}" in refused["message"]
    blind = post(client, "generate", num=2, length=2)["resume"]
    refused = error(client.post("/v1/observe", json={"x": x.tolist(), "resume": blind}), 422)
    assert "x cannot follow this state" in refused["message"] and refused["param"] == "resume"
    refused = error(client.post("/v1/resume", json={"resume": blind, "recondition": True}), 422)
    assert "recondition=True cannot start from this state" in refused["message"]
    assert refused["param"] == "recondition"
    assert (
        "x has 3 rows; give 2, or one row for all"
        in error(
            client.post(
                "/v1/observe",
                json={"x": sequences(model, 3, 1).tolist(), "resume": first["resume"]},
            ),
            422,
        )["message"]
    )


def test_prompts_as_tokens_and_text(client):
    text = post(client, "generate", model="letters", prompt="badcab", num=2)
    tokens = post(client, "generate", model="letters", prompt=[1, 0, 3, 2, 0, 1], num=2)
    assert text["x"] == tokens["x"]
    assert [len(line) for line in text["text"]] == [2, 2], "what is left of a sequence"
    assert set("".join(text["text"])) <= set("abcde")
    refused = error(client.post("/v1/generate", json={"model": "letters", "prompt": "xyz"}), 422)
    assert refused["param"] == "prompt"
    assert "outside the vocabulary" in refused["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"num": 257}, "num", "at most 256"),
        ({"length": 4097}, "length", "at most 4096"),
        ({"num": 256, "length": 4096}, "num", "at most 65536"),
        ({"num": 0}, "num", "num=0 is not allowed: input should be greater than or equal to 1"),
        ({"num": "2"}, "num", 'num="2" is not allowed: input should be a valid integer'),
        ({"model": "rnn", "recondition": True}, "recondition", "vssm and tvae, not rnn"),
        ({"model": "any", "recondition": True}, "recondition", "/v1/fill has passes"),
        ({"temperature": 0}, "temperature", "temperature=0 is not allowed: input should be"),
        ({"temperature": 1e-300}, "temperature", "should be greater than or equal to 0.000"),
        ({"prompt": []}, "prompt", "prompt is empty; give one step or more, or leave it out"),
        ({"observe": "mode"}, "observe", "'mean' or 'sample'"),
        ({"prompt": [[1, 2]]}, "prompt", "it must be (batch, length, 3)"),
        (
            {"prompt": [[[1, 2, 3]], [[1, 2, 3]]], "num": 3},
            "prompt",
            "prompt has 2 rows; give 3, or one row for all",
        ),
        ({"prompt": "text"}, "prompt", "numbers"),
        ({"seed": 2**63}, "seed", "=9223372036854775808 is not allowed: input should be less"),
        ({"stream": None}, "stream", "stream=null is not allowed: input should be a valid boolean"),
        ({"keep": True}, "keep", "keep=true is not allowed: input should be 'server' or 'none'"),
        ({"model": "m" * 65}, "model", "model is not allowed: string should have at most 64"),
        ({"prompt": 3}, "prompt", "prompt=3 is not allowed: input should be nested lists of"),
        ({"colour": 1}, "colour", "field 'colour' is unknown; /docs lists the fields"),
        ({"a\nb": 1}, "a\nb", r"field 'a\nb' is unknown"),
        ([1], None, "the body is not an object; send a JSON object of fields"),
        (None, None, "the body is not an object; send a JSON object of fields"),
    ],
)
def test_refusals_name_the_field(client, body, param, words):
    kind = {"content-type": "application/json"}
    refused = error(client.post("/v1/generate", content=json.dumps(body), headers=kind), 422)
    assert refused["param"] == param
    assert words in refused["message"]


def test_every_field_says_what_it_takes(client):
    for route, other in (("generate", {}), ("resume", {"resume": "h.x"}), ("observe", {})):
        names = list(body_schema(client, route)["properties"])
        assert len(names) > 5
        for name in names:
            refused = error(client.post(f"/v1/{route}", json={**other, name: {}}), 422)
            assert refused["message"].startswith(f"{name} is not allowed: ")
            assert " should " in refused["message"] and refused["param"] == name
    refused = error(client.post("/v1/resume", json={}), 422)
    assert (refused["message"], refused["param"]) == ("resume is missing", "resume")


def test_a_full_queue_is_429_and_says_when_to_come_back(models, monkeypatch):
    app, seed = create_app(models[:1], Settings(max_queue=4)), torch.zeros(1, dtype=torch.int64)
    worker, go_on = app.state.worker, threading.Event()
    held = lambda batch: go_on.wait(30) and compute(batch)  # noqa: E731
    calls = lambda: make_steps(models[0], seed, seed, 4)  # noqa: E731
    monkeypatch.setattr("vssm.serve.worker.compute", held)
    with TestClient(app) as client:
        wait_until_ready(client)
        mine = [client.portal.call(submit, worker, calls()) for _ in range(4)]
        reply = client.post("/v1/generate", json={})
        assert error(reply, 429)["type"] == "busy"
        assert int(reply.headers["retry-after"]) >= 1
        assert error(client.post("/v1/generate", json={"stream": True}), 429)["type"] == "busy"
        go_on.set()
        wait_for(lambda: not worker.scheduler.jobs)
        assert all(future.result().x.shape == (1, 4, 3) for future in mine)
        assert client.post("/v1/generate", json={}).status_code == 200


def test_a_request_that_takes_too_long_is_504(models):
    with TestClient(
        create_app([one for one in models if one.name == "ssm"], Settings(timeout=0.2))
    ) as client:
        wait_until_ready(client)
        reply = client.post("/v1/generate", json={"length": 4096})
        assert error(reply, 504)["type"] == "timeout"
        stream = client.post("/v1/generate", json={"length": 4096, "stream": True})
        assert events(stream.text)[-1][0] == "error"


def test_a_token_guards_everything_but_the_pages_and_the_probes(models):
    with TestClient(create_app(models[:1], token=RIGHT)) as client:
        for path in ("/", "/docs", "/openapi.json", "/healthz", "/readyz"):
            assert client.get(path).status_code in (200, 503)
        for path in ("/v1/models", "/metrics", "/nowhere", "/docs/"):
            assert error(client.get(path), 401)["type"] == "unauthorized"
            assert client.get(path).headers["www-authenticate"] == "Bearer"
        for scheme in ("Bearer", "bearer", "BEARER"):
            right = {"authorization": f"{scheme} {RIGHT}"}
            assert client.get("/v1/models", headers=right).status_code == 200
        other = {"authorization": f"Basic {RIGHT}"}
        assert client.get("/v1/models", headers=other).status_code == 401
        assert client.head("/healthz").status_code == 200


def test_outputs_that_overflow_are_an_error():
    one = served("ssm")
    with torch.no_grad():
        one.model.stack.out.bias.fill_(3e38)
        one.model.stack.out.weight.fill_(3e38)
    with TestClient(create_app([one])) as client:
        wait_until_ready(client)
        refused = error(client.post("/v1/generate", json={"length": 4}), 422)
        assert refused["type"] == "overflow"
        assert "NaN or infinity" in refused["message"]
        *_, (name, last) = events(
            client.post("/v1/generate", json={"length": 4, "stream": True}).text
        )
        assert (name, last["error"]["type"]) == ("error", "overflow")


@pytest.mark.parametrize("name", ["vssm", "ssm", "letters"])
def test_the_examples_of_the_interface_are_answered(models, name):
    with TestClient(create_app([one for one in models if one.name == name])) as client:
        wait_until_ready(client)
        for example in body_schema(client, "generate")["examples"]:
            reply = client.post("/v1/generate", json=example)
            assert reply.status_code == 200, reply.text[:300]


@pytest.mark.gpu
def test_a_model_on_a_gpu_reads_prompts_and_goes_on():
    one = served("vssm")
    one.model.cuda()
    with TestClient(create_app([one])) as client:
        wait_until_ready(client)
        x = sequences(one.model, 2, 4)
        place = post(client, "observe", x=x.tolist())["resume"]
        first = array(post(client, "generate", prompt=x.tolist(), length=3))
        close(array(post(client, "resume", resume=place, length=3)), first)
        assert array(post(client, "resume", resume=place, length=3, seed=1)).shape == (2, 3, 3)


def test_models_pages_and_numbers(client):
    listed = client.get("/v1/models").json()
    assert [one["name"] for one in listed["models"]] == [
        *NAMES,
        "levels",
        "any",
        "letters",
        "image",
    ]
    assert listed["models"][-1]["image_shape"] == [6, 3, 1]
    assert listed["limits"]["max_num"] == 256
    assert array(post(client, "generate", model="image")).shape == (1, 6, 3), "as long as its data"
    page = client.get("/")
    assert len(page.content) < 200_000
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//|@import|url\(", page.text), (
        "nothing from elsewhere"
    )
    assert "default-src 'none'" in page.headers["content-security-policy"]
    spec = client.get("/openapi.json").json()
    for route in ("generate", "resume"):
        answer = spec["paths"][f"/v1/{route}"]["post"]["responses"]["200"]["content"]
        assert set(answer) == {"application/json", "text/event-stream"}
    assert "/openapi.json" in client.get("/docs").text  # tests/browser opens it
    numbers = client.get("/metrics").text
    assert 'vssm_requests_total{route="/v1/generate",status="200"}' in numbers
    assert re.search(r"vssm_batch_rows_count [1-9]", numbers)
    assert error(client.get("/nowhere"), 404)["type"] == "not_found"
    assert error(client.get("/v1/generate"), 405)["type"] == "method"


def test_health_routes_answer_head_and_do_not_name_the_process(client):
    assert client.get("/healthz").json() == {"status": "ok"}
    for path in ("/healthz", "/readyz"):
        reply = client.head(path)
        assert (reply.status_code, reply.content) == (200, b"")


def test_browsers_must_not_guess_the_type_of_an_answer(client):
    answers = [
        client.get(path) for path in ("/v1/models", "/healthz", "/openapi.json", "/", "/nowhere")
    ]
    answers += [
        client.post("/v1/generate", json=body) for body in ({}, {"num": 0}, {"stream": True})
    ]
    answers.append(client.post("/v1/generate", content="{"))
    for reply in answers:
        assert reply.headers["x-content-type-options"] == "nosniff"


def state_of(size):
    return State({"h": torch.zeros(1, size // 4)}, 1)


def test_states_are_kept_for_a_time_up_to_a_number_and_a_size():
    now = [0.0]
    store = Store(seconds=10, count=3, bytes=1000, clock=lambda: now[0])
    a, b, c = (store.put("m", state_of(100)) for _ in range(3))
    assert store.get(a)[0] == "m"
    d = store.put("m", state_of(100))  # b is the least recently used
    with pytest.raises(Refused, match="unknown, has expired or was evicted"):
        store.get(b)
    assert store.get(c) and store.get(d) and len(store) == 3
    e = store.put("m", state_of(900))
    assert len(store) == 2, "old ones go until the sizes fit"
    with pytest.raises(Refused, match="the state has 1004 bytes, more than 1000"):
        store.put("m", state_of(1004))
    now[0] = 9
    store.get(e)
    now[0] = 18
    assert store.get(e)[1].batch == 1, "use keeps it"
    now[0] = 29
    with pytest.raises(Refused) as refused:
        store.get(e)
    assert refused.value.status_code == 404
    assert len(store) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_can_only_answer_nonsense_is_not_served(value, tmp_path):
    model = small_model("ssm", "categorical")
    name, parameter = list(model.named_parameters())[-1]
    torch.nn.init.constant_(parameter, value)
    save(model, tmp_path / "model")
    message = rf"model': tensor '{name}' holds NaN or infinity; train the model again"
    with pytest.raises(ValueError, match=message):
        open_models([str(tmp_path / "model")])


def test_what_may_be_served_and_where(tmp_path, monkeypatch):
    import vssm

    vssm.save(small_model("vssm"), tmp_path / "run")
    opened, _ = open_models([f"{tmp_path / 'run'}", f"second={tmp_path / 'run'}"])
    assert [one.name for one in opened] == ["run", "second"]
    with pytest.raises(ValueError, match="each name once"):
        open_models([str(tmp_path / "run")] * 2)
    with pytest.raises(ValueError, match=r"model name '\.\./x' is not allowed"):
        open_models([f"../x={tmp_path / 'run'}"])
    monkeypatch.setattr("vssm.runs.pretrained.names", lambda: ())
    with pytest.raises(ValueError, match="ships no models"):
        open_models([])
    for host in ("::1", "localhost"):
        assert host in exposed_settings(Settings(), host, guarded=False).hosts
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", ""):
        with pytest.raises(ValueError, match="--token-file"):
            exposed_settings(Settings(), host, guarded=False)
        assert not exposed_settings(Settings(), host, guarded=True).hosts
    (tmp_path / "token").write_text("correct-horse-battery\n")
    assert read_secret(tmp_path / "token") == "correct-horse-battery"
    (tmp_path / "token").write_text("short\n")
    with pytest.raises(ValueError, match="16 or more"):
        read_secret(tmp_path / "token")
    (tmp_path / "token").write_bytes(b"\xc8" * 40)
    with pytest.raises(ValueError, match="holds no secret"):
        read_secret(tmp_path / "token")
    with pytest.raises(ValueError, match="max_queue is 0"):
        Settings(max_queue=0)
