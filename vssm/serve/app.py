"""The routes, the form of errors, and the page that describes the routes."""

import asyncio
import contextlib
import html
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from importlib.resources import files
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from vssm.serve.body import BodyReader
from vssm.serve.engine import Engine
from vssm.serve.errors import Refused
from vssm.serve.guard import Guard, Metrics
from vssm.serve.models import Served
from vssm.serve.schema import (
    ErrorReply,
    GenerateRequest,
    ModelsReply,
    ObserveReply,
    ObserveRequest,
    Reply,
    ResumeRequest,
    mistake,
)
from vssm.serve.service import Service, json_response
from vssm.serve.settings import Settings

__all__ = ["create_app"]

_log = logging.getLogger("vssm.serve")
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
_STYLE = (
    '<meta name="viewport" content="width=device-width"><style>'
    "body{font:1rem/1.5 system-ui;max-width:50rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "pre{overflow:auto;padding:.5rem;border:1px solid}td{vertical-align:top;padding:0 .8rem 0 0}</style>"
)
_HOST = re.compile(r"([\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?", re.ASCII)
_BODIES = {
    "/v1/generate": GenerateRequest,
    "/v1/resume": ResumeRequest,
    "/v1/observe": ObserveRequest,
}
_OTHER_LISTS = 64  # in a body, beside those of sequences and steps
_CODES = (400, 401, 403, 404, 408, 410, 413, 415, 422, 429, 503, 504)
_ERRORS: dict[int | str, dict[str, Any]] = {code: {"model": ErrorReply} for code in _CODES}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
    **_ERRORS,
}


class _ParsedRequest(Request):
    """A request whose body the guard has parsed."""

    async def json(self) -> Any:  # noqa: ANN401
        return self.scope["vssm.body"]


class _Route(APIRoute):
    """A route that takes the body as the guard has parsed it; FastAPI would parse it again."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            return await handle(_ParsedRequest(request.scope, request.receive))

        return handle_parsed


def create_app(
    models: list[Served],
    settings: Settings | None = None,
    token: str | None = None,
    key: bytes | None = None,
) -> FastAPI:
    """Returns the app; its engine runs from start-up to shutdown.

    Arguments:
        models: What is served, the default first.
        settings: The limits.
        token: What clients must send as bearer; None for no token.
        key: Seals states that clients keep; a random one by default, so that they end with the process.
    """
    settings = settings or Settings()
    metrics = Metrics()
    engine = Engine(models, settings, metrics.watch)
    server = Service(engine, settings, metrics, key or secrets.token_bytes(32))
    bodies = BodyReader(settings.max_cells + settings.max_num + _OTHER_LISTS)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.close)
        bodies.close()

    app = FastAPI(
        title="vssm",
        description="Sequence models that generate in parallel, follow a prompt and resume. "
        "With `stream`, the answer is a stream of server-sent events: `chunk` (from, x, text, timing), "
        "then `done` (all but x and text), or `error`.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.add_middleware(Guard, settings=settings, metrics=metrics, bodies=bodies, token=token)
    app.router.route_class = _Route
    app.state.server = server
    _add_errors(app)
    _add_pages(app, server)

    examples = _examples(models[0])

    @app.post(
        "/v1/generate", response_model=Reply, responses=_ANSWERS, openapi_extra=examples["generate"]
    )
    async def generate(ask: GenerateRequest, request: Request) -> Response:
        """Generates sequences, from nothing or after a prompt."""
        return await server.answer(request, server.plan_generate(ask))

    @app.post(
        "/v1/resume", response_model=Reply, responses=_ANSWERS, openapi_extra=examples["resume"]
    )
    async def resume(ask: ResumeRequest, request: Request) -> Response:
        """Goes on from where an answer stopped; the same place can be resumed many times."""
        return await server.answer(request, server.plan_resume(ask))

    @app.post(
        "/v1/observe",
        response_model=ObserveReply,
        responses=_ERRORS,
        openapi_extra=examples["observe"],
    )
    async def observe(ask: ObserveRequest, request: Request) -> Response:
        """Reads data, first or more of it, and returns where to resume from."""
        return await server.observe(request, ask)

    @app.get("/v1/models", response_model=ModelsReply, responses={401: {"model": ErrorReply}})
    async def list_models() -> Response:
        """Says what is served, and what one request may ask for."""
        limits = {
            name: getattr(settings, name)
            for name in ("max_num", "max_length", "max_cells", "max_body")
        }
        return json_response({"models": [served.describe() for served in models], "limits": limits})

    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return json_response(error.body(), error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        message, param = mistake(_BODIES[request.scope["route"].path], error.errors()[0])
        return json_response(Refused(422, "invalid", message, param).body(), 422)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        names = {404: "not_found", 405: "method"}
        name = names.get(error.status_code, "invalid")
        body = Refused(error.status_code, name, f"{error.detail}; see /docs".lower()).body()
        return json_response(body, error.status_code, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        _log.error("failed: %s", type(error).__name__)
        body = Refused(500, "internal", "the server failed; its log says why").body()
        return json_response(
            body, 500, {"x-content-type-options": "nosniff"}
        )  # the guard is not asked


def _add_pages(app: FastAPI, server: Service) -> None:
    page = files("vssm.serve").joinpath("page.html").read_text()

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse(page, headers=_HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return HTMLResponse(_describe(app.openapi(), _address(request)), headers=_HEADERS)

    def check() -> None:
        if server.engine.failure is not None:
            raise Refused(503, "failed", server.engine.failure)

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", response_model=dict[str, str], responses={503: {"model": ErrorReply}})
    async def healthz() -> Response:
        """Says that the process answers and can compute."""
        check()
        return json_response({"status": "ok"})

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", response_model=dict[str, str], responses={503: {"model": ErrorReply}})
    async def readyz() -> Response:
        """Says whether requests are being computed."""
        check()
        if not server.engine.alive:
            raise Refused(503, "not_ready", "the server is starting or stopping", retry_after=1)
        return json_response({"status": "ready"})

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Says how much was done, for Prometheus."""
        numbers = server.metrics
        numbers.waiting.set(server.engine.waiting)
        numbers.in_progress.set(server.engine.in_progress)
        numbers.states.set(len(server.store))
        numbers.state_bytes.set(server.store.held)
        return Response(generate_latest(numbers.registry), media_type=CONTENT_TYPE_LATEST)


def _examples(served: Served) -> dict[str, dict[str, Any]]:
    """Returns examples by route that the default model answers; only `resume` must be filled in."""
    two_steps = [0, 1] if served.model.head.tokens else [[0] * served.model.config.features] * 2
    dial = {"chunk": 1, "recondition": True} if served.parallel else {}
    pace = {"chunk": 4} if served.parallel else {"every": 4}
    values = {
        "generate": {
            "Sixteen sequences": {"num": 16, "seed": 7},
            "Four continuations of two steps, step by step": {
                "num": 4,
                "length": 8,
                **dial,
                "prompt": two_steps,
            },
            "As they are made": {"length": 12, **pace, "stream": True},
        },
        "resume": {"Twelve more steps": {"resume": "RESUME_OF_AN_ANSWER", "length": 12}},
        "observe": {"Two steps of data": {"x": two_steps}},
    }
    made = {}
    for route, cases in values.items():
        shown = {
            str(i): {"summary": name, "value": value}
            for i, (name, value) in enumerate(cases.items())
        }
        made[route] = {"requestBody": {"content": {"application/json": {"examples": shown}}}}
    return made


def _address(request: Request) -> str:
    """Returns where the client has reached us."""
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(
        host
    ):  # the client may send anything, and commands are pasted into shells
        name, port = request.scope.get("server") or ("127.0.0.1", 8000)
        host = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    return f"{request.url.scheme}://{html.escape(host)}"


def _describe(spec: dict[str, Any], address: str) -> str:
    """Returns the OpenAPI page: every route, its fields and examples, with nothing fetched from elsewhere."""
    parts = []
    for path, methods in spec["paths"].items():
        for method, route in methods.items():
            parts.append(
                f"<h2>{method.upper()} {path}</h2><p>{html.escape(route.get('description', ''))}</p>"
            )
            content = route.get("requestBody", {}).get("content", {}).get("application/json")
            if content is None:
                continue
            fields = spec["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]][
                "properties"
            ]
            rows = "".join(
                f"<tr><td><code>{name}</code><td>{html.escape(field.get('description', ''))}"
                for name, field in fields.items()
            )
            parts.append(f"<table>{rows}</table>")
            for example in content.get("examples", {}).values():
                body = html.escape(orjson.dumps(example["value"]).decode())
                curl = (
                    "curl -N" if example["value"].get("stream") else "curl"
                )  # -N shows chunks as they come
                command = f"{curl} -H 'content-type: application/json' -d '{body}' {address}{path}"
                parts.append(f"<p>{html.escape(example['summary'])}:</p><pre>{command}</pre>")
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>vssm: API</title>{_STYLE}'
    intro = f"<h1>vssm: API</h1><p>{html.escape(spec['info']['description'])}</p>"
    link = '<p><a href="/openapi.json">openapi.json</a> · <a href="/">the page</a></p>'
    return head + intro + link + "".join(parts)
