"""Connections: uvicorn's protocol with limits on idle, slow and half-open clients."""

import asyncio
import functools
import os
from collections import OrderedDict

from uvicorn.protocols.http.h11_impl import H11Protocol

from vssm.serve.errors import Refused, json_bytes
from vssm.serve.settings import Settings

__all__ = ["limited_protocol"]

_MAX_IDLE = 512  # connections without an accepted request; `ulimit -n` is often 1024


def limited_protocol(settings: Settings) -> type[asyncio.Protocol]:
    """Returns a protocol for uvicorn.

    - A connection is idle until the guard accepts its request, and again after the answer. When too
      many are idle, the one that has been idle longest is dropped: a new client always gets in.
    - A client that sends no whole head, or does not read its answer, is dropped after a while.
    - A request that is not valid HTTP is refused in the form of all errors.
    """
    idle: OrderedDict[int, asyncio.Transport] = OrderedDict()  # the longest idle first
    files = os.sysconf("SC_OPEN_MAX")
    max_idle = min(_MAX_IDLE, files // 2) if files > 0 else _MAX_IDLE

    class LimitedProtocol(H11Protocol):
        _unread: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait_for_request()

        def handle_events(self) -> None:
            super().handle_events()
            if self.cycle is not None and not self.cycle.response_complete:
                self._deadline.cancel()
                # By number: a reference to self would be a cycle that keeps requests in memory.
                accept = functools.partial(idle.pop, id(self), None)
                self.cycle.scope["vssm.accept"] = accept  # type: ignore[typeddict-unknown-key]

        def on_response_complete(self) -> None:
            self._deadline.cancel()
            self._wait_for_request()
            super().on_response_complete()

        def send_400_response(self, msg: str) -> None:
            refused = Refused(400, "not_http", "the request is not valid HTTP/1.1")
            body = json_bytes(refused.body())
            head = (
                "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close"
                f"\r\nx-content-type-options: nosniff\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self.transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self._drop_after(settings.timeout)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._unread is not None:
                self._unread.cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            idle.pop(id(self), None)
            self._deadline.cancel()
            if self._unread is not None:
                self._unread.cancel()
            super().connection_lost(exc)

        def _wait_for_request(self) -> None:
            self._deadline = self._drop_after(settings.body_timeout)
            idle[id(self)] = self.transport
            idle.move_to_end(id(self))
            if len(idle) > max_idle:
                idle.popitem(last=False)[1].abort()

        def _drop_after(self, seconds: float) -> asyncio.TimerHandle:
            # Not close(), which would wait until the client has read everything.
            return self.loop.call_later(seconds, self.transport.abort)

    return LimitedProtocol
