"""The routes, and how errors become answers."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from vssm.serve.body import BodyReader
from vssm.serve.errors import Refused, json_response
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
    read_request,
)
from vssm.serve.service import Service
from vssm.serve.settings import Settings
from vssm.serve.worker import Worker

__all__ = ["create_app"]

_log = logging.getLogger("vssm.serve")
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
}
_OTHER_LISTS = 64  # lists in a body besides those of sequences and steps
_CODES = (400, 401, 403, 404, 408, 410, 413, 415, 422, 429, 503, 504)
_ERRORS: dict[int | str, dict[str, Any]] = {code: {"model": ErrorReply} for code in _CODES}


def create_app(
    models: list[Served],
    settings: Settings | None = None,
    token: str | None = None,
    key: bytes | None = None,
) -> FastAPI:
    """Returns the app; its worker runs from start-up to shutdown.

    Arguments:
        models: The models to serve, the default first.
        settings: The limits.
        token: What clients must send as bearer; None for no token.
        key: Seals states that clients keep; by default random, so that they end with the process.
    """
    settings = settings or Settings()
    metrics = Metrics()
    worker = Worker(models, settings, metrics.watch)
    service = Service(worker, settings, metrics, key or secrets.token_bytes(32))
    bodies = BodyReader(settings.max_cells + settings.max_num + _OTHER_LISTS)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.close)
        bodies.close()

    app = FastAPI(
        title="vssm",
        description="Sequence models that generate in parallel, follow a prompt and resume. With "
        "`stream`, the answer is a stream of server-sent events: `chunk` (from, x, text, timing), "
        "then `done` (all but x and text), or `error`.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.add_middleware(Guard, settings=settings, metrics=metrics, bodies=bodies, token=token)
    app.state.worker = worker
    _add_errors(app)
    _add_pages(app)
    _add_probes(app, service)
    _add_calls(app, service)

    @app.get("/v1/models", response_model=ModelsReply, responses={401: {"model": ErrorReply}})
    async def list_models() -> Response:
        """Lists the models, and the limits of one request."""
        names = ("max_num", "max_length", "max_cells", "max_body")
        limits = {name: getattr(settings, name) for name in names}
        return json_response({"models": [served.describe() for served in models], "limits": limits})

    return app


def _add_calls(app: FastAPI, service: Service) -> None:
    """Adds the routes that compute. The guard has parsed their bodies."""
    examples = _examples(service.worker.models[0])
    stream = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
    for path, kind, reply, responses in (
        ("/v1/generate", GenerateRequest, Reply, stream | _ERRORS),
        ("/v1/resume", ResumeRequest, Reply, stream | _ERRORS),
        ("/v1/observe", ObserveRequest, ObserveReply, _ERRORS),
    ):
        content = {"schema": kind.model_json_schema(), "examples": examples[kind]}
        body = {"content": {"application/json": content}, "required": True}
        app.add_api_route(
            path,
            _endpoint(service, kind),
            methods=["POST"],
            name=path.rpartition("/")[2],
            description=kind.__doc__ or "",
            response_model=reply,
            responses=responses,
            openapi_extra={"requestBody": body},
        )


def _endpoint(
    service: Service, kind: type[GenerateRequest | ResumeRequest | ObserveRequest]
) -> Callable[[Request], Awaitable[Response]]:
    async def call(request: Request) -> Response:
        job = service.plan(read_request(kind, request.scope["vssm.body"]))
        return await service.answer(request, job)

    return call


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        name = {404: "not_found", 405: "method"}.get(error.status_code, "invalid")
        message = f"{error.detail}; see /docs".lower()
        return Refused(error.status_code, name, message).response(**(error.headers or {}))

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        _log.error("failed: %s", type(error).__name__)
        refused = Refused(500, "internal", "the server failed; its log says why")
        return refused.response(**{"x-content-type-options": "nosniff"})  # outside of the guard


def _add_pages(app: FastAPI) -> None:
    for path, name in (("/", "page.html"), ("/docs", "docs.html")):
        response = HTMLResponse(files("vssm.serve").joinpath(name).read_bytes(), headers=_HEADERS)
        app.add_route(path, lambda _, response=response: response, include_in_schema=False)


def _add_probes(app: FastAPI, service: Service) -> None:
    worker = service.worker
    options: dict[str, Any] = {
        "response_model": dict[str, str],
        "responses": {503: {"model": ErrorReply}},
    }

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", **options)
    async def healthz() -> Response:
        """Says that the process answers and can compute."""
        if worker.failure is not None:
            raise Refused(503, "failed", worker.failure)
        return json_response({"status": "ok"})

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", **options)
    async def readyz() -> Response:
        """Says whether requests are being computed."""
        await healthz()
        if not worker.ready:
            raise Refused(503, "not_ready", "the server is starting or stopping", retry_after=1)
        return json_response({"status": "ready"})

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Returns metrics for Prometheus."""
        metrics = service.metrics
        metrics.waiting.set(worker.waiting)
        metrics.in_progress.set(worker.in_progress)
        metrics.states.set(len(service.store))
        metrics.state_bytes.set(service.store.held)
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _examples(served: Served) -> dict[type, dict[str, Any]]:
    """Returns examples that the default model answers; only `resume` must be filled in."""
    two_steps = [0, 1] if served.model.head.tokens else [[0] * served.model.config.features] * 2
    dials = {"chunk": 1, "recondition": True} if served.parallel else {}
    pace = {"chunk": 4} if served.parallel else {"every": 4}
    prompted = {"num": 4, "length": 8, **dials, "prompt": two_steps}
    examples: dict[type, dict[str, Any]] = {
        GenerateRequest: {
            "Sixteen sequences": {"num": 16, "seed": 7},
            "Four continuations of two steps, step by step": prompted,
            "A stream": {"length": 12, **pace, "stream": True},
        },
        ResumeRequest: {"Twelve more steps": {"resume": "RESUME_OF_AN_ANSWER", "length": 12}},
        ObserveRequest: {"Two steps of data": {"x": two_steps}},
    }
    return {
        kind: {
            str(number): {"summary": summary, "value": value}
            for number, (summary, value) in enumerate(cases.items())
        }
        for kind, cases in examples.items()
    }
