"""Servers for tests: small models, an app in this process, or `vssm serve` in one of its own."""

import asyncio
import contextlib
import importlib.util
import json
from pathlib import Path

import vssm
from tests.conftest import small_model
from vssm.data import Meta
from vssm.serve.models import Served
from vssm.serve.worker import Worker

ROOT = Path(__file__).parent.parent
IMAGE = Meta(name="squares", features=3, length=6, suggested_head="gaussian", image_shape=(6, 3, 1))
TEXT = Meta(name="text", features=5, length=8, suggested_head="categorical", vocabulary="abcde")


def served(kind, name=None, head="gaussian", meta=None, **options):
    meta = meta or (TEXT if head == "categorical" else None)
    return Served(name or kind, small_model(kind, head, **options).eval(), meta)


def results_of(models, requests, settings=None):
    """Computes requests, each a series of calls, and returns their results or errors."""

    async def run():
        worker = Worker(models, settings)
        futures = [worker.submit(calls) for calls in requests]  # all before the first is computed
        worker.close()
        await worker.run()
        return await asyncio.gather(*futures, return_exceptions=True)

    return asyncio.run(run())


def save_models(
    folder, kinds=("vssm", "ssm", "transformer"), meta=None, head="gaussian", **options
):
    """Writes small models as `vssm serve` reads them, and returns their folders."""
    places = []
    for kind in kinds:
        places.append(str(folder / kind))
        size = {} if meta is None else {"features": meta.features}
        vssm.save(small_model(kind, head, **size, **options), places[-1])
        if meta is not None:
            path = Path(places[-1]) / "config.json"
            values = json.loads(path.read_text())
            path.write_text(json.dumps({**values, "data_meta": meta.to_json()}))
    return places


def load_script():
    """Returns experiments/serve_load.py as a module."""
    spec = importlib.util.spec_from_file_location(
        "serve_load", ROOT / "experiments" / "serve_load.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def running(folders, *options):
    """Yields the process and the address of a server."""
    with load_script().server(list(folders), *options) as (process, port):
        yield process, f"http://127.0.0.1:{port}"


def error(reply, status):
    """Returns the error of an answer, which must have the one form of errors."""
    assert reply.status_code == status, reply.text[:300]
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"type", "message", "param"}
    assert "\n" not in body["error"]["message"]
    return body["error"]


def body_schema(client, route):
    """Returns the schema of the bodies that a route takes."""
    spec = client.get("/openapi.json").json()
    content = spec["paths"][f"/v1/{route}"]["post"]["requestBody"]["content"]
    return spec["components"]["schemas"][
        content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    ]
