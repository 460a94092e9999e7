"""What every request passes first: host, token, kind, size and time of its body; then log and metrics.

The body is read here, whole, so that a slow or endless one is refused before anything else looks at it, and
parsed once by a parser with a limit on depth that knows no NaN. The log has the route, the status and the
time, never what was sent.
"""

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson
import pydantic_core
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vssm.serve.errors import Refused
from vssm.serve.settings import Settings

__all__ = ["Guard", "Metrics"]

_log = logging.getLogger("vssm.serve")
_OPEN = ("/", "/docs", "/openapi.json", "/healthz", "/readyz")
_DROP = 64 * 2**20  # of a body that is refused, so much is still read for the answer to arrive
_MAX_FIELDS = 64

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Metrics:
    """The numbers at /metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "vssm_requests", "Requests answered.", ["route", "status"], registry=self.registry
        )
        self.latency = Histogram(
            "vssm_request_seconds", "Time to the end of the answer.", ["route"], registry=self.registry
        )
        self.rows = Counter("vssm_rows", "Sequences computed.", ["model"], registry=self.registry)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        self.batch = Histogram(
            "vssm_batch_rows", "Sequences computed together.", buckets=sizes, registry=self.registry
        )
        self.compute = Counter(
            "vssm_compute_seconds", "Time spent computing.", ["model"], registry=self.registry
        )
        self.cancelled = Counter("vssm_cancelled", "Requests whose client left.", registry=self.registry)
        self.in_progress = Gauge("vssm_in_progress", "Requests in progress.", registry=self.registry)
        self.waiting = Gauge("vssm_waiting", "Passes that wait to be computed.", registry=self.registry)
        self.states = Gauge("vssm_states", "States kept for resuming.", registry=self.registry)
        self.state_bytes = Gauge(
            "vssm_state_bytes", "Bytes of states kept for resuming.", registry=self.registry
        )

    def watch(self, name: str, rows: int, seconds: float) -> None:
        """Counts a batch."""
        self.rows.labels(name).inc(rows)
        self.batch.observe(rows)
        self.compute.labels(name).inc(seconds)


class Guard:
    """Wraps an ASGI app.

    Arguments:
        app: The app.
        settings: The limits.
        metrics: Where requests are counted.
        token: What clients must send as bearer; None for no token.
    """

    def __init__(self, app: Any, settings: Settings, metrics: Metrics, token: str | None = None) -> None:  # noqa: ANN401
        self._app, self._settings, self._metrics = app, settings, metrics
        self._token = None if token is None else token.encode()
        self._held = 0  # bytes of the bodies of all requests in progress

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 499  # what is logged when the client leaves before an answer

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        parts: list[bytes] = []
        try:
            try:
                self._check(scope)
                await self._read(receive, parts)
                body = b"".join(parts)
                parts[:] = [body]
                if scope["method"] == "POST":
                    self._check_body(body)
            except Refused as refused:
                await answer(refused, sending)
            else:
                await self._app(scope, _replay(body, receive), sending)
        except Exception:  # answered with 500 outside of us
            status = 500
            raise
        finally:
            self._held -= sum(map(len, parts))
            route = getattr(scope.get("route"), "path", "-")
            seconds = time.perf_counter() - began
            self._metrics.requests.labels(route, status).inc()
            self._metrics.latency.labels(route).observe(seconds)
            _log.info("%s %s %d %.1f ms", scope["method"][:8], route, status, 1e3 * seconds)

    def _check(self, scope: Message) -> None:
        headers = dict(scope["headers"])
        if self._settings.hosts:  # keeps pages of other sites, whose names lead here, from calling us
            host = re.sub(r":\d*$", "", headers.get(b"host", b"").decode("latin1").lower())
            if host not in self._settings.hosts and host[1:-1] not in self._settings.hosts:  # [::1]
                allowed = ", ".join(self._settings.hosts)
                raise Refused(421, "host", f"this server does not answer to that name; allowed: {allowed}")
        if self._token is not None and scope["path"] not in _OPEN:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self._token):
                raise Refused(401, "unauthorized", "a token is needed; allowed: Authorization: Bearer TOKEN")
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            if kind != b"application/json":  # a browser asks before it sends JSON to another site
                raise Refused(415, "content_type", "the body has another type; allowed: application/json")

    async def _read(self, receive: Receive, parts: list[bytes]) -> None:
        """Appends the body to `parts`, whose bytes are counted as held."""
        size, limit = 0, self._settings.max_body
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(400, "disconnected", "the client left before its request was complete")
                    size += len(message.get("body", b""))
                    if size <= limit:
                        parts.append(message.get("body", b""))
                        self._held += len(parts[-1])
                        if self._held > max(limit, self._settings.max_bodies):
                            raise Refused(
                                429, "busy", "other requests are too large; try again soon", None, 1
                            )
                    elif size > _DROP:
                        break
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            wait = self._settings.body_timeout
            raise Refused(408, "too_slow", f"the body did not arrive in time; allowed: {wait:g} s") from None
        if size > limit:
            raise Refused(413, "too_large", f"the body is too large; allowed: {limit} bytes")

    def _check_body(self, body: bytes) -> None:
        # A list costs as much as many numbers, and a field that is not allowed a message of its own.
        lists = self._settings.max_cells + self._settings.max_num + _MAX_FIELDS
        if body.count(b"[") > lists:
            raise Refused(422, "too_many", f"the body holds too many lists; allowed: at most {lists}")
        try:
            content = pydantic_core.from_json(body, allow_inf_nan=False)
        except ValueError:
            message = "the body is no JSON; allowed: an object, finite numbers"
            raise Refused(400, "not_json", message) from None
        if isinstance(content, dict) and len(content) > _MAX_FIELDS:
            raise Refused(422, "too_many", f"{len(content)} fields is not allowed; allowed: {_MAX_FIELDS}")


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def receive_again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


async def answer(refused: Refused, send: Send) -> None:
    """Sends an error as an answer."""
    headers = {"content-type": "application/json", "connection": "close", **refused.headers}
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": pairs})
    await send({"type": "http.response.body", "body": orjson.dumps(refused.body())})
