"""What every request passes first: host, token, kind, size and time of its body; then log and metrics.

The body is received here, whole, so that a slow or endless one is refused before anything else looks at it,
and is parsed once (`body`); routes find its content in the scope. The log has the route, the status and the
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
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vssm.serve.body import BadBody, BodyReader
from vssm.serve.errors import Refused
from vssm.serve.settings import Settings

__all__ = ["Guard", "Metrics"]

_log = logging.getLogger("vssm.serve")
_OPEN = ("/", "/docs", "/openapi.json", "/healthz", "/readyz")
_DROP = (
    64 * 2**20
)  # bytes of a refused body that are still read, so that the client can read the answer
_NOSNIFF = (b"x-content-type-options", b"nosniff")  # browsers must not guess another type
_GUESS_SECONDS = 1.0  # until a wrong token is refused
_ONCE = (b"host", b"authorization", b"content-type")  # what is checked here must not be ambiguous

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
            "vssm_request_seconds",
            "Time to the end of the answer.",
            ["route"],
            registry=self.registry,
        )
        self.rows = Counter("vssm_rows", "Sequences computed.", ["model"], registry=self.registry)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        self.batch = Histogram(
            "vssm_batch_rows", "Sequences computed together.", buckets=sizes, registry=self.registry
        )
        self.compute = Counter(
            "vssm_compute_seconds", "Time spent computing.", ["model"], registry=self.registry
        )
        self.cancelled = Counter(
            "vssm_cancelled", "Requests whose client left.", registry=self.registry
        )
        self.in_progress = Gauge(
            "vssm_in_progress", "Requests in progress.", registry=self.registry
        )
        self.waiting = Gauge(
            "vssm_waiting", "Passes that wait to be computed.", registry=self.registry
        )
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
        bodies: Parses bodies.
        token: What clients must send as bearer; None for no token.
    """

    def __init__(
        self,
        app: Any,  # noqa: ANN401
        settings: Settings,
        metrics: Metrics,
        bodies: BodyReader,
        token: str | None = None,
    ) -> None:
        self._app, self._settings, self._metrics, self._bodies = app, settings, metrics, bodies
        self._token = None if token is None else token.encode()
        self._held = 0  # bytes of the bodies of all requests in progress

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = (
            time.perf_counter(),
            499,
        )  # what is logged when the client leaves before an answer

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), _NOSNIFF]}
            await send(message)

        parts: list[bytes] = []
        held, inner, content = 0, scope, None
        try:
            refused = await self._receive(scope, receive, parts)
            if refused is None and scope["method"] == "POST":
                body = b"".join(parts)
                held = len(body)
                parts.clear()
                try:
                    content = await self._bodies.read(body)
                except BadBody as bad:
                    refused = Refused(*bad.args)
                del body
            if refused is not None:
                await answer(refused, sending)
            else:
                if accept := scope.get("extensions", {}).get("vssm.accept"):
                    accept()
                inner = {
                    **scope,
                    "vssm.body": content,
                }  # not in the scope, which a connection may keep
                await self._app(inner, _replay(receive), sending)
        except Exception:  # answered with 500 outside of us
            status = 500
            raise
        finally:
            self._held -= held + sum(map(len, parts))
            route = getattr(inner.get("route"), "path", "-")
            seconds = time.perf_counter() - began
            self._metrics.requests.labels(route, status).inc()
            self._metrics.latency.labels(route).observe(seconds)
            _log.info("%s %s %d %.1f ms", scope["method"][:8], route, status, 1e3 * seconds)

    async def _receive(
        self, scope: Message, receive: Receive, parts: list[bytes]
    ) -> Refused | None:
        """Checks the head and appends the body to `parts`, whose bytes are counted as held.

        Returns why the request is refused, if it is. Its body is received then, too, and dropped: a client
        that is still sending when its connection is closed can not read the answer.
        """
        refused, size, more = self._check(scope), 0, True
        limit, seconds = self._settings.max_body, self._settings.body_timeout
        if (
            refused is not None
            and dict(scope["headers"]).get(b"expect", b"").lower() == b"100-continue"
        ):
            more = False  # its body was not sent yet, and need not be
        try:
            async with asyncio.timeout(seconds):
                while more and size <= _DROP:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return Refused(
                            400, "disconnected", "the client left before its request was complete"
                        )
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if refused is None and size > limit:
                        refused = Refused(
                            413, "too_large", f"the body is too large; allowed: {limit} bytes"
                        )
                    elif refused is None and self._held + len(part) > max(
                        limit, self._settings.max_bodies
                    ):
                        refused = Refused(
                            429, "busy", "other requests are too large; try again soon", None, 1
                        )
                    if refused is None:
                        parts.append(part)
                        self._held += len(part)
                    else:
                        self._held -= sum(map(len, parts))
                        parts.clear()
        except TimeoutError:
            message = f"the body did not arrive in time; allowed: {seconds:g} s"
            refused = refused or Refused(408, "too_slow", message)
        if (
            refused is not None
            and refused.status == 401
            and b"authorization" in dict(scope["headers"])
        ):
            await asyncio.sleep(_GUESS_SECONDS)
        return refused

    def _check(self, scope: Message) -> Refused | None:
        """Returns what is wrong with the head of a request."""
        headers, names = dict(scope["headers"]), [name for name, _ in scope["headers"]]
        for name in _ONCE:
            if names.count(name) > 1:
                return Refused(
                    400, "invalid", f"the header {name.decode()} was sent more than once; send one"
                )
        if (
            self._settings.hosts
        ):  # keeps pages of other sites, whose names lead here, from calling us
            host = re.sub(r":\d*$", "", headers.get(b"host", b"").decode("latin1").lower())
            if host not in self._settings.hosts and host[1:-1] not in self._settings.hosts:  # [::1]
                allowed = ", ".join(self._settings.hosts)
                return Refused(
                    421, "host", f"this server does not answer to that name; allowed: {allowed}"
                )
        if self._token is not None and scope["path"] not in _OPEN:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if not hmac.compare_digest(given.strip(), self._token) or scheme.lower() != b"bearer":
                message = "a token is needed; allowed: Authorization: Bearer TOKEN"
                return Refused(401, "unauthorized", message)
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            if kind != b"application/json":  # a browser asks before it sends JSON to another site
                return Refused(
                    415, "content_type", "the body has another type; allowed: application/json"
                )
        declared, limit = headers.get(b"content-length", b""), self._settings.max_body
        if declared.isdigit() and int(declared[:20]) > limit:
            return Refused(413, "too_large", f"the body is too large; allowed: {limit} bytes")
        return None


def _replay(receive: Receive) -> Receive:
    """Receives a body again that was received before; what it held is in the scope."""
    sent = False

    async def receive_again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": b"{}", "more_body": False}

    return receive_again


async def answer(refused: Refused, send: Send) -> None:
    """Sends an error as an answer."""
    headers = {"content-type": "application/json", "connection": "close", **refused.headers}
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": pairs})
    await send({"type": "http.response.body", "body": orjson.dumps(refused.body())})
