"""What every request passes first: checks of its head and body, then the log and metrics.

The whole body is received here, so that a slow or endless one is refused early. The log has route,
status and time, never the content.
"""

import asyncio
import hmac
import logging
import re
import time
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vssm.serve.errors import Refused
from vssm.serve.settings import Settings

__all__ = ["Guard", "Metrics"]

_log = logging.getLogger("vssm.serve")
_OPEN = ("/", "/docs", "/openapi.json", "/healthz", "/readyz")  # need no token
_DRAIN = 64 * 2**20  # bytes of a refused body that are still received
_NOSNIFF = (b"x-content-type-options", b"nosniff")  # browsers must not guess another type


class Metrics:
    """The metrics at /metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry: CollectorRegistry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests: Counter = counter("vssm_requests", "Requests answered.", ["route", "status"])
        self.latency: Histogram = histogram(
            "vssm_request_seconds", "Time to the end of the answer.", ["route"]
        )
        self.rows: Counter = counter("vssm_rows", "Sequences computed.", ["model"])
        sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        self.batch: Histogram = histogram(
            "vssm_batch_rows", "Sequences computed together.", buckets=sizes
        )
        self.compute: Counter = counter("vssm_compute_seconds", "Time spent computing.", ["model"])
        self.cancelled: Counter = counter("vssm_cancelled", "Requests whose client left.")
        self.in_progress: Gauge = gauge("vssm_in_progress", "Requests in progress.")
        self.waiting: Gauge = gauge("vssm_waiting", "Requests that have not begun.")
        self.states: Gauge = gauge("vssm_states", "States kept for resuming.")
        self.state_bytes: Gauge = gauge("vssm_state_bytes", "Bytes of states kept for resuming.")

    def watch(self, name: str, rows: int, seconds: float) -> None:
        """Counts a batch."""
        self.rows.labels(name).inc(rows)
        self.batch.observe(rows)
        self.compute.labels(name).inc(seconds)


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
        connection is closed can not read the answer.
        """
        headers = dict(scope["headers"])
        refused, size = self._check_head(scope, headers), 0
        # A client that waits for "100 Continue" has not sent its body yet.
        more = refused is None or headers.get(b"expect", b"").lower() != b"100-continue"
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                while more and size <= _DRAIN:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(400, "disconnected", "the client left while it was sending")
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    refused = refused or self._check_size(size)
                    if refused is None:
                        parts.append(part)
                    else:
                        parts.clear()
        except TimeoutError:
            message = f"the body did not arrive within {self._settings.body_timeout:g} s"
            refused = refused or Refused(408, "too_slow", message)
        if refused is not None:
            raise refused
        return b"".join(parts)

    def _check_size(self, size: int) -> Refused | None:
        if size <= self._settings.max_body:
            return None
        message = f"the body is too large; send at most {self._settings.max_body} bytes"
        return Refused(413, "too_large", message)

    def _check_head(self, scope: Scope, headers: dict[bytes, bytes]) -> Refused | None:
        hosts = self._settings.hosts
        if hosts:  # protects from pages of other sites whose names lead here
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
