"""`vssm serve` in one process, on uvicorn.

SIGTERM and Ctrl-C stop taking requests, finish what runs, streams included, and end the process.
An engine that fails ends it too, with exit code 1.
"""

import asyncio
import functools
import gc
import ipaddress
import json
import logging
import math
import os
import secrets
import signal
import socket
import stat
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vssm.serve.settings import Settings

__all__ = ["check_exposure", "drain_seconds", "only_local", "read_secret", "serve"]

_MAX_IDLE = 512  # connections without an accepted request; `ulimit -n` is often 1024
_MAX_HEAD = 64 * 2**10  # bytes of a request before its body
_LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(
    sources: Sequence[str],
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings | None = None,
    token: str | None = None,
    key: bytes | None = None,
    insecure: bool = False,
    device: str = "cpu",
) -> None:
    """Serves models until the process is told to stop.

    Arguments:
        sources: What to serve, see `open_models`.
        host: The address to listen on.
        port: The port; 0 for any that is free.
        settings: The limits.
        token: What clients must send as bearer.
        key: Seals the states that clients keep.
        insecure: Allows an address that others can reach without a token.
        device: Where the models run.
    """
    local = check_exposure(host, token, insecure)
    try:
        import uvicorn

        from vssm.serve.app import create_app
    except ImportError as error:
        raise ValueError(
            f"serving needs {error.name}; install it with: pip install 'vssm[serve]'"
        ) from None
    from vssm.serve.models import open_models

    settings = settings or Settings()
    if settings.threads is None:
        # Threads wait for each other: one that had to share its core with the connections would hold up all.
        settings = replace(settings, threads=max(1, (os.cpu_count() or 2) - 1))
    if local:
        settings = only_local(settings, host)
    models = open_models(sources, device)
    listener = _listen(host, port)
    app = create_app(models, settings, token, key or secrets.token_bytes(32))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    config = uvicorn.Config(
        app,
        http=_impatient(settings),
        ws="none",
        access_log=False,  # ours leaves out what was sent
        log_level="warning",
        timeout_graceful_shutdown=drain_seconds(settings),
        server_header=False,
    )
    shown = f"[{host}]" if ":" in host else host
    names = ", ".join(served.name for served in models)
    print(
        f"serving {names} at http://{shown}:{listener.getsockname()[1]}  (Ctrl-C ends)", flush=True
    )
    # uvicorn sends itself the signal again once it has drained; then the work is done and all is well.
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: sys.exit(0))
    server, engine = uvicorn.Server(config), app.state.server.engine
    engine.on_failure = lambda: setattr(
        server, "should_exit", True
    )  # who started us can start us again
    gc.collect()
    gc.freeze()  # a collection that looks at all of PyTorch's objects stops every request for 0.4 s
    try:
        server.run(sockets=[listener])
    finally:
        gc.unfreeze()
    if engine.failure is not None:
        print(f"vssm: {engine.failure}", file=sys.stderr)
        sys.exit(1)


def check_exposure(host: str, token: str | None, insecure: bool) -> bool:
    """Returns whether only this machine can reach an address; one that others can reach needs a token.

    Example:
        >>> check_exposure("127.0.0.1", None, False)
        True
        >>> check_exposure("0.0.0.0", None, False)
        Traceback (most recent call last):
        ValueError: host='0.0.0.0' can be reached by others; allowed: --token-file FILE, or --insecure
    """
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and token is None and not insecure:
        raise ValueError(
            f"host={host!r} can be reached by others; allowed: --token-file FILE, or --insecure"
        )
    return local


def only_local(settings: Settings, host: str) -> Settings:
    """Returns settings for a server that answers to the names of this machine alone."""
    return replace(settings, hosts=tuple(dict.fromkeys((*_LOCAL, host))))


def drain_seconds(settings: Settings) -> int:
    """Returns the longest that a request may take, which is what those that run have at the end."""
    return math.ceil(settings.body_timeout + settings.timeout)


def read_secret(path: Path, name: str) -> str:
    """Returns the one line of a file that holds a secret."""
    if not path.exists():  # a pipe is as good as a file
        raise ValueError(f"{name}={str(path)!r} does not exist; allowed: a file with the secret")
    mode = path.stat().st_mode
    if stat.S_ISREG(mode) and mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"{name}={str(path)!r} can be changed by other users; run: chmod go-w {path}"
        )
    secret = path.read_bytes().decode(errors="replace").strip()
    if len(secret) < 16 or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ValueError(
            f"{name}={str(path)!r} holds no secret; allowed: one word of 16 or more characters"
        )
    return secret


def _impatient(settings: Settings) -> type[asyncio.Protocol]:
    """Returns uvicorn's protocol with bounds on idle connections and without two of its gaps.

    - A connection is idle until the guard accepts its request, and again after the answer. When too many are
      idle, the one that has been idle longest is dropped, so that a new client always gets in.
    - A client that sends no whole head, or does not read its answer, is dropped after a while.
    - Trailers are ignored. uvicorn would append them to the headers that the guard checks.
    - What is not HTTP is refused in the form of all errors.
    """
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from vssm.serve.errors import Refused

    idle: OrderedDict[int, asyncio.Transport] = OrderedDict()  # the longest idle first
    files = os.sysconf("SC_OPEN_MAX")
    max_idle = min(_MAX_IDLE, files // 2) if files > 0 else _MAX_IDLE

    class Impatient(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._head, self._unread = 0, None
            self._deadline = self._drop_after(settings.body_timeout)
            self._is_idle()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._head = 0
                self._deadline.cancel()
                return
            if not self._head and self._deadline.cancelled():
                self._deadline = self._drop_after(settings.body_timeout)
            self._head += len(data)
            if self._head > _MAX_HEAD:
                self.transport.abort()

        def on_headers_complete(self) -> None:
            # Keyed by number: a reference to self would be a cycle that keeps requests in memory.
            accept: Any = functools.partial(idle.pop, id(self), None)
            self.scope["extensions"] = {"vssm.accept": accept}
            super().on_headers_complete()
            self.headers = []  # trailers are appended to this list, no longer to that of the scope

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._is_idle()

        def send_400_response(self, msg: str) -> None:
            body = json.dumps(
                Refused(400, "not_http", "the request is no valid HTTP/1.1").body()
            ).encode()
            head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            head += f"x-content-type-options: nosniff\r\ncontent-length: {len(body)}\r\n\r\n"
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
            for timer in (self._deadline, self._unread):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def _is_idle(self) -> None:
            idle[id(self)] = self.transport
            idle.move_to_end(id(self))
            if len(idle) > max_idle:
                idle.popitem(last=False)[1].abort()

        def _drop_after(self, seconds: float) -> asyncio.TimerHandle:
            # Not close(), which would first wait for what was written to be read.
            return self.loop.call_later(seconds, lambda: self.transport.abort())

    return Impatient


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port < 2**16:
        raise ValueError(f"port={port} is not allowed; allowed: 0 to 65535")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"can not listen on host={host!r}, port={port}: {error.strerror or error}"
        ) from None
    return listener
