"""The routes, and how errors become answers."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from importlib.resources import files
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from vssm.serve.errors import Refused, json_response
from vssm.serve.forecast import ForecastRequest
from vssm.serve.guard import Guard, Metrics
from vssm.serve.models import Served, ServedForecaster
from vssm.serve.schema import (
    FillRequest,
    GenerateRequest,
    ObserveRequest,
    ResumeRequest,
    explain,
)
from vssm.serve.service import Service
from vssm.serve.settings import Settings
from vssm.serve.worker import Worker

__all__ = ["create_app"]

_log = logging.getLogger("vssm.serve")
_ABOUT = (
    "Sequence models that generate in parallel, follow a prompt and resume. With `stream`, the "
    "answer is a stream of server-sent events: `chunk` (from, x, text, timing), then `done` (all "
    "but x and text), or `error`."
)
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src "
    "'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_NAMES = {400: "not_json", 404: "not_found", 405: "method"}  # of errors of the router
_ERRORS: Any = {"4XX": {"description": '{"error": {"type": ..., "message": ..., "param": ...}}'}}
_STREAM: Any = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


class _StrictRequest(Request):
    async def json(self) -> Any:  # noqa: ANN401
        return orjson.loads(await self.body())  # refuses NaN, half characters and deep nesting


class _StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return read


def create_app(
    models: list[Served],
    settings: Settings | None = None,
    token: str | None = None,
    forecasters: Sequence[ServedForecaster] = (),
) -> FastAPI:
    """Returns the app; its worker runs from start-up to shutdown.

    The first model and the first forecaster are the defaults. Clients must send the token, if any,
    as bearer.
    """
    settings = settings or Settings()
    metrics = Metrics()
    worker = Worker(models, settings, metrics.watch)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(worker.run())
        yield
        worker.close()
        await running

    options: Any = {"docs_url": None, "redoc_url": None, "responses": _ERRORS}
    app = FastAPI(title="vssm", description=_ABOUT, lifespan=lifespan, **options)
    app.add_middleware(Guard, settings=settings, metrics=metrics, token=token)
    app.router.route_class = _StrictRoute
    app.state.worker = worker
    _add_errors(app)
    _add_calls(app, Service(worker, list(forecasters), settings, metrics))
    _add_probes(app, worker)
    headers = {"content-security-policy": _POLICY}
    for path, name in (("/", "page.html"), ("/docs", "docs.html")):
        response = HTMLResponse(files("vssm.serve").joinpath(name).read_bytes(), headers=headers)
        app.add_route(path, lambda _, response=response: response, include_in_schema=False)
    return app


def _add_calls(app: FastAPI, service: Service) -> None:
    @app.post("/v1/generate", responses=_STREAM)
    async def generate(request: Request, ask: GenerateRequest) -> Response:
        """Generates sequences, from nothing or after a prompt. Returns the new steps x, their text
        for a model of text, the position and resume, which /v1/resume takes."""
        return await service.make(request, ask, ask.prompt)

    @app.post("/v1/resume", responses=_STREAM)
    async def resume(request: Request, ask: ResumeRequest) -> Response:
        """Continues where an answer stopped; the same place can be resumed many times."""
        return await service.make(request, ask, None, ask.resume)

    @app.post("/v1/observe")
    async def observe(request: Request, ask: ObserveRequest) -> Response:
        """Reads data and returns where to resume; `resume` adds more data to earlier data."""
        return await service.make(request, ask, ask.x, ask.resume)

    @app.post("/v1/fill")
    async def fill(request: Request, ask: FillRequest) -> Response:
        """Fills the gaps of sequences, for a model with `known` "any". Returns x, its text for a
        model of text, and the order: which pass made an entry, from 0; -1 if it was known."""
        return await service.fill(request, ask)

    @app.post("/v1/forecast")
    async def forecast(request: Request, ask: ForecastRequest) -> Response:
        """Forecasts what follows raw histories. Returns rows with unique_id, ds, mean and a column
        for each quantile, or with the list `paths`."""
        return await service.forecast(request, ask)

    @app.get("/v1/models")
    async def list_models() -> Response:
        """Lists the models and forecasters, the defaults first, and the limits of one request."""
        names = ("max_num", "max_length", "max_cells", "max_body")
        limits = {name: getattr(service.settings, name) for name in names}
        models = [served.describe() for served in service.worker.models]
        forecasters = [served.describe() for served in service.forecasters]
        return json_response({"models": models, "forecasters": forecasters, "limits": limits})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Returns metrics for Prometheus."""
        metrics = service.metrics
        metrics.waiting.set(service.worker.scheduler.waiting)
        metrics.in_progress.set(len(service.worker.scheduler.jobs))
        metrics.states.set(len(service.store))
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def wrong(_: Request, error: RequestValidationError) -> Response:
        return explain(error).response()

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        if isinstance(error, Refused):
            return error.response()
        name = _NAMES.get(error.status_code, "invalid")
        refused = Refused(error.status_code, name, f"{error.detail}; see /docs".lower())
        return refused.response(**(error.headers or {}))

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        _log.error("failed: %s", type(error).__name__)
        refused = Refused(500, "internal", "the server failed; its log says why")
        return refused.response(**{"x-content-type-options": "nosniff"})  # outside of the guard


def _add_probes(app: FastAPI, worker: Worker) -> None:
    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz")
    async def healthz() -> Response:
        """Says that the process answers and can compute."""
        if worker.failure is not None:
            raise Refused(503, "failed", worker.failure)
        return json_response({"status": "ok"})

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz")
    async def readyz() -> Response:
        """Says whether requests are being computed."""
        await healthz()
        if not worker.ready:
            raise Refused(503, "not_ready", "the server is starting or stopping")
        return json_response({"status": "ready"})
