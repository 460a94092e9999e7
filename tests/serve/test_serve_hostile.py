"""What a stranger may send: refused with a typed 4xx, not logged, and the server goes on."""

import asyncio
import itertools
import json
import logging
import tracemalloc

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from tests.serve.test_serve import wait_for, wait_until_ready
from tests.serving import error, served
from vssm.serve.app import create_app
from vssm.serve.run import exposed_settings
from vssm.serve.schema import GenerateRequest
from vssm.serve.service import Service
from vssm.serve.settings import Settings

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def app():
    models = [served("vssm"), served("ssm"), served("vssm", "letters", "categorical")]
    limits = Settings(
        max_num=8, max_length=32, max_cells=128, max_body=200_000, body_timeout=0.5, resume_count=8
    )
    return create_app(models, limits)


@pytest.fixture(scope="module")
def client(app):
    with TestClient(app, raise_server_exceptions=False) as client:
        wait_until_ready(client)
        yield client


@pytest.fixture(autouse=True)
def _goes_on(client):
    yield
    assert client.post("/v1/generate", json={"num": 1, "length": 2}).status_code == 200
    assert client.get("/readyz").status_code == 200


BODIES = {
    "empty": (b"", 422),
    "no JSON": (b"{", 400),
    "no UTF-8": (b'{"prompt": "\xff\xfe"}', 400),
    "deep": (b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
    "many lists": (b'{"prompt": [' + b",".join([b"[]"] * 50_000) + b"]}", 422),
    "many fields": (b"{" + b",".join(b'"%d":0' % i for i in range(15_000)) + b"}", 422),
    "deeper than arrays go": (b'{"prompt": ' + b"[" * 90 + b"1" + b"]" * 90 + b"}", 422),
    "deep objects": (b'{"a":' * 30_000 + b"1" + b"}" * 30_000, 400),
    "NaN": (b'{"prompt": [[NaN, 0, 0]]}', 400),
    "infinity": (b'{"temperature": Infinity}', 400),
    "overflow": (b'{"prompt": [[1e999, 0, 0]]}', 400),
    "too large for 32 bits": (b'{"prompt": [[1e39, 0, 0]]}', 422),
    "too large for 64 bits": (b'{"prompt": [[1' + b"0" * 400 + b", 0.5, 0]]}", 400),
    "huge number": (b'{"num": 1' + b"0" * 3000 + b"}", 400),
    "huge seed": (b'{"seed": 1' + b"0" * 30 + b"}", 422),
    "huge num times length": (b'{"num": 8, "length": 32}', 422),
    "num past its type": (b'{"num": 4611686018427387904, "length": 4611686018427387904}', 422),
    "long prompt": (json.dumps({"prompt": [[0, 0, 0]] * 33, "length": 1}).encode(), 422),
    "ragged": (b'{"prompt": [[1, 2, 3], [1, 2]]}', 422),
    "mixed": (b'{"prompt": [[1, "2", null]]}', 422),
    "objects": (b'{"prompt": [[{}, {}, {}]]}', 422),
    "booleans": (b'{"prompt": [[true, false, true]]}', 422),
    "a list": (b"[]", 422),
    "a string": (b'"x"', 422),
    "null": (b"null", 422),
    "oversized": (b'{"prompt": "' + b"x" * 300_000 + b'"}', 413),
    "token out of range": (b'{"model": "letters", "prompt": [5]}', 422),
    "negative token": (b'{"model": "letters", "prompt": [-1]}', 422),
    "token past 64 bits": (b'{"model": "letters", "prompt": [18446744073709551615]}', 422),
    "fractional token": (b'{"model": "letters", "prompt": [0.5]}', 422),
    "nul text": (b'{"model": "letters", "prompt": "\\u0000"}', 422),
    "lone surrogate": (b'{"model": "letters", "prompt": "\\ud800"}', 400),
}


@pytest.mark.parametrize("name", BODIES)
def test_bad_bodies(client, name):
    body, status = BODIES[name]
    error(client.post("/v1/generate", content=body, headers=JSON), status)


def test_what_is_refused_is_refused_before_it_costs_memory():
    body = {"prompt": ["x" * 5000, *[""] * 5000]}
    tracemalloc.start()
    with pytest.raises(ValidationError, match="nested lists of numbers, equally long"):
        GenerateRequest(**body)
    assert tracemalloc.get_traced_memory()[1] < 2**20, "numpy alone would make 5001 strings of 5000"
    tracemalloc.stop()


def test_states_that_are_too_large_to_keep_are_refused():
    app = create_app([served("transformer")], Settings(resume_mib=1))
    with TestClient(app) as client:
        wait_until_ready(client)
        ask = {"num": 16, "length": 400}  # 256 bytes a step
        refused = error(client.post("/v1/generate", json=ask), 413)
        assert (refused["type"], refused["param"]) == ("state_too_large", "keep")
        assert "more than 1048576; ask for fewer sequences or steps" in refused["message"]
        assert client.post("/v1/generate", json={**ask, "keep": "none"}).status_code == 200


def test_memory_does_not_grow_without_end_by_going_on():
    with TestClient(
        create_app([served("transformer"), served("ssm")], Settings(max_length=8))
    ) as client:
        wait_until_ready(client)
        for model, status in (("transformer", 422), ("ssm", 200)):
            place = client.post("/v1/observe", json={"model": model, "x": [[0, 0, 0]] * 6}).json()[
                "resume"
            ]
            replies = [
                client.post("/v1/observe", json={"resume": place, "x": [[0, 0, 0]] * 6}),
                client.post("/v1/resume", json={"resume": place, "length": 8}),
            ]
            assert replies[0].status_code == status, "a transformer remembers every step"
            place = replies[1].json()["resume"]
            assert (
                client.post("/v1/resume", json={"resume": place, "length": 1}).status_code == status
            )


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "vssm/../vssm",
        "vssm\x00",
        "VSSM",
        "..",
        "%2e%2e",
        "hf://a/b",
        "vssm=x",
        "\u202e\x1b[2J" + "é" * 59,
        "",
    ],
)
def test_model_names_are_only_looked_up(client, name):
    refused = error(client.post("/v1/generate", json={"model": name}), 404)
    assert refused == {
        "type": "unknown_model",
        "message": f"model={name!r} is unknown; use vssm, ssm, letters",
        "param": "model",
    }
    for path in ("/..%2f..%2fetc/passwd", "//etc/passwd", "/page.html", "/v1/../../etc/passwd"):
        error(client.get(path), 404)


def test_forged_and_evicted_handles(client):
    first = client.post("/v1/generate", json={"length": 2}).json()["resume"]
    for _ in range(8):
        client.post("/v1/generate", json={"length": 2})
    for handle in (first, "h.", "h." + "A" * 32, "x", "h.../../x", first.upper()):
        body = {"resume": handle if len(handle) > 1 else "xx", "length": 1}
        assert error(client.post("/v1/resume", json=body), 404)["type"] == "resume_unknown"


def test_nothing_that_was_sent_is_logged(client, caplog):
    secret = "very-private-words"
    caplog.set_level(logging.DEBUG)
    bodies = [
        {"prompt": secret},
        {secret: 1},
        {"model": secret},
        {"model": "letters", "prompt": secret},
    ]
    for body in bodies:
        assert client.post("/v1/generate", json=body).status_code in (404, 422)
    client.post("/v1/resume", json={"resume": secret})
    client.get(f"/{secret}?{secret}")
    assert "POST /v1/generate 422" in caplog.text
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith("httpx")]
    assert secret not in "\n".join(ours)


async def call(app, messages, wait=0.0, headers=()):
    """Sends messages of ASGI, one every `wait` seconds, and returns those that come back."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/generate",
        "headers": [(b"content-type", b"application/json"), *headers],
        "query_string": b"",
    }
    sent, rest = [], iter(messages)

    async def receive():
        await asyncio.sleep(wait)
        return next(rest)

    async def send(message):
        sent.append(message)

    await asyncio.wait_for(app(scope, receive, send), 30)
    return sent


def part(body=b" ", more=True):
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_that_is_announced_as_too_large_is_not_asked_for(app):
    headers = [(b"content-length", b"99999999"), (b"expect", b"100-continue")]
    start, _ = asyncio.run(call(app, [], headers=headers))  # to receive anything would raise
    assert start["status"] == 413


def test_a_slow_body_is_given_up(app):
    start, body = asyncio.run(call(app, itertools.repeat(part()), 0.1))
    assert start["status"] == 408
    assert json.loads(body["body"])["error"]["type"] == "too_slow"


def test_a_client_that_left_before_its_stream_began_leaves_its_place(app, client):
    client.portal.call(call, app, [part(b'{"stream": true}', False), {"type": "http.disconnect"}])
    wait_for(lambda: not app.state.worker.scheduler.jobs)


def test_a_bug_is_a_500_in_the_answer_the_log_and_the_numbers(app, client, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patch:
        patch.setattr(Service, "make", lambda *given: 1 / 0)
        assert error(client.post("/v1/generate", json={}), 500)["type"] == "internal"
    assert "POST /v1/generate 500" in caplog.text
    assert (
        'vssm_requests_total{route="/v1/generate",status="500"} 1.0' in client.get("/metrics").text
    )


def test_other_sites_can_not_call_a_local_server():
    with TestClient(create_app([served("vssm")], Settings(hosts=("127.0.0.1",)))) as client:
        assert error(client.get("/healthz"), 421)["type"] == "host"
        assert client.get("/healthz", headers={"host": "127.0.0.1:8000"}).status_code == 200
        for host in (
            "127.0.0.1.example.org",
            "example.org:127.0.0.1",
            "",
            "127.0.0.1:80@example.org",
        ):
            assert error(client.get("/healthz", headers={"host": host}), 421)["type"] == "host"
        headers = {"host": "127.0.0.1", "content-type": "text/plain"}
        assert (
            error(client.post("/v1/generate", content="{}", headers=headers), 415)["type"]
            == "content_type"
        )


def test_a_local_server_names_each_of_its_names_once():
    with TestClient(
        create_app([served("vssm")], exposed_settings(Settings(), "127.0.0.1", guarded=False))
    ) as client:
        refused = error(client.get("/healthz", headers={"host": "example.org"}), 421)
    assert refused["message"].endswith("; use 127.0.0.1, localhost, ::1")


def test_a_local_server_answers_to_every_way_of_writing_its_name():
    with TestClient(
        create_app([served("vssm")], exposed_settings(Settings(), "127.0.0.2", guarded=False))
    ) as client:
        for host in ("[::1]", "[::1]:8000", "LOCALHOST:80", "127.0.0.1", "127.0.0.2:8000"):
            assert client.get("/healthz", headers={"host": host}).status_code == 200, host


def test_no_schema_breaking_request_is_a_server_error(app, client):
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_dict(app.openapi())
    tried = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @given(case=operation.as_strategy())
        @settings(
            max_examples=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )
        def attack(case):
            nonlocal tried
            tried += 1
            sent = case.as_transport_kwargs(base_url="http://testserver")
            sent.pop("cookies", None)
            reply = client.request(**sent)
            assert reply.status_code < 500, reply.text[:300]
            assert reply.status_code == 200 or set(reply.json()) == {"error"}

        attack()
    assert tried > 100
