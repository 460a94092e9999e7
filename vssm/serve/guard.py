"""The guard that every request passes first: it checks head and body, and keeps log and metrics.

The whole body is received here, so that a slow or endless one is refused early. The log has route,
status and time, never the content.
"""

import asyncio
import hmac
import logging
import re
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vssm.serve.errors import Refused
from vssm.serve.settings import Settings

_log = logging.getLogger("vssm.serve")
_OPEN = ("/", "/docs", "/openapi.json", "/healthz", "/readyz")  # need no token
_DRAIN = 64 * 2**20  # bytes of a refused body that are still received
_NOSNIFF = (b"x-content-type-options", b"nosniff")  # browsers must not guess another type


class Metrics:
    """The metrics at /metrics, in a registry of their own."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry: CollectorRegistry = registry
        sizes, names = (1, 2, 4, 8, 16, 32, 64, 128, 256), ["route", "status"]
        own: dict[str, Any] = {"registry": registry}
        self.requests: Counter = Counter("vssm_requests", "Requests answered.", names, **own)
        self.latency: Histogram = Histogram(
            "vssm_request_seconds", "Time to the end of the answer.", ["route"], **own
        )
        self.batch: Histogram = Histogram(
            "vssm_batch_rows", "Sequences computed together.", buckets=sizes, **own
        )
        self.rows: Counter = Counter("vssm_rows", "Sequences computed.", ["model"], **own)
        self.cancelled: Counter = Counter("vssm_cancelled", "Requests whose client left.", **own)
        self.in_progress: Gauge = Gauge("vssm_in_progress", "Requests in progress.", **own)
        self.waiting: Gauge = Gauge("vssm_waiting", "Requests that have not begun.", **own)
        self.states: Gauge = Gauge("vssm_states", "States kept for resuming.", **own)

    def watch(self, name: str, rows: int) -> None:
        """Counts a batch."""
        self.rows.labels(name).inc(rows)
        self.batch.observe(rows)


class Guard:
    """Wraps an ASGI app. `token` is what clients must send as bearer, None for no token."""

    def __init__(
        self, app: ASGIApp, settings: Settings, metrics: Metrics, token: str | None = None
    ) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 499  # 499: the client left before an answer

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), _NOSNIFF]}
            await send(message)

        bodies: list[bytes] = []

        async def replay() -> Message:
            return {"type": "http.request", "body": bodies.pop()} if bodies else await receive()

        try:
            bodies.append(await self._receive(scope, receive))
            await self._app(scope, replay, sending)
        except Refused as refused:
            headers = {"www-authenticate": "Bearer"} if refused.status_code == 401 else {}
            await refused.response(connection="close", **headers)(scope, receive, sending)
        except Exception:  # answered with 500 outside of the guard
            status = 500
            raise
        finally:
            route = getattr(scope.get("route"), "path", "-")
            seconds = time.perf_counter() - began
            self._metrics.requests.labels(route, status).inc()
            self._metrics.latency.labels(route).observe(seconds)
            _log.info("%s %s %d %.1f ms", scope["method"][:8], route, status, 1e3 * seconds)

    async def _receive(self, scope: Scope, receive: Receive) -> bytes:
        """Returns the body of a request, or raises `Refused`.

        The rest of a refused body is received too: a client that is still sending when its
        connection is closed cannot read the answer.
        """
        headers, limits = dict(scope["headers"]), self._settings
        refused, body, size = self._check_head(scope, headers), bytearray(), 0
        # A client that waits for "100 Continue" has not sent its body yet.
        more = refused is None or headers.get(b"expect", b"").lower() != b"100-continue"
        try:
            async with asyncio.timeout(limits.body_timeout):
                while more and size <= _DRAIN:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(400, "disconnected", "the client left while it was sending")
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size <= limits.max_body:
                        body += part
        except TimeoutError:
            message = f"the body did not arrive within {limits.body_timeout:g} s"
            refused = refused or Refused(408, "too_slow", message)
        refused = refused or self._check_size(size)
        if refused is not None:
            raise refused
        return bytes(body)

    def _check_size(self, size: int) -> Refused | None:
        message = f"the body is too large; send at most {self._settings.max_body} bytes"
        return Refused(413, "too_large", message) if size > self._settings.max_body else None

    def _check_head(self, scope: Scope, headers: dict[bytes, bytes]) -> Refused | None:
        hosts = self._settings.hosts
        if hosts:  # protects from pages of other sites whose names resolve to this server
            host = re.sub(r":\d*$", "", headers.get(b"host", b"").decode("latin1").lower())
            if host not in hosts and host[1:-1] not in hosts:  # [::1]
                message = f"this server has another name; use {', '.join(hosts)}"
                return Refused(421, "host", message)
        if self._token is not None and scope["path"] not in _OPEN:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if not hmac.compare_digest(given.strip(), self._token) or scheme.lower() != b"bearer":
                message = "a token is needed; send the header Authorization: Bearer TOKEN"
                return Refused(401, "unauthorized", message)
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        # A browser asks for permission before it sends JSON to another site.
        if scope["method"] == "POST" and kind != b"application/json":
            message = "the body has another content type; use application/json"
            return Refused(415, "content_type", message)
        declared = headers.get(b"content-length", b"")
        return self._check_size(int(declared[:20])) if declared.isdigit() else None
