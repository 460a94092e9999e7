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
from starlette.exceptions import HTTPException

from vssm.serve.errors import Refused
from vssm.serve.guard import Guard, Metrics
from vssm.serve.models import Served, ServedForecaster
from vssm.serve.schema import explain
from vssm.serve.service import Service
from vssm.serve.settings import Settings
from vssm.serve.worker import Worker

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

    The first model that can do what is asked and the first forecaster are the defaults. Clients
    must send the token, if any, as bearer.
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
    _add_routes(app, Service(worker, list(forecasters), settings, metrics))
    headers = {"content-security-policy": _POLICY}
    for path, name in (("/", "page.html"), ("/docs", "docs.html")):
        response = HTMLResponse(files("vssm.serve").joinpath(name).read_bytes(), headers=headers)
        app.add_route(path, lambda _, response=response: response, include_in_schema=False)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    streams = {"generate": service.generate, "resume": service.resume}
    others = {"observe": service.observe, "fill": service.fill, "forecast": service.forecast}
    for name, answer in {**streams, **others}.items():
        app.post(f"/v1/{name}", responses=_STREAM if name in streams else None)(answer)
    app.get("/v1/models")(service.list_models)
    app.get("/metrics")(service.show_metrics)
    for path, answer in (("/healthz", service.healthz), ("/readyz", service.readyz)):
        app.get(path)(answer)
        app.head(path, include_in_schema=False)(answer)


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
