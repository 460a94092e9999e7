"""`vssm serve` in one process, on uvicorn.

SIGTERM and Ctrl-C stop taking requests, finish what runs, including streams, and end the process.
If computing fails, the process ends with exit code 1.
"""

import gc
import ipaddress
import logging
import math
import os
import re
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import uvicorn
from tyro.conf import Positional, arg

from vssm.checks import choose_device
from vssm.serve.app import create_app
from vssm.serve.models import open_models
from vssm.serve.settings import Settings

_MAX_HEAD = 64 * 2**10  # bytes of a request before its body
_LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(
    models: Positional[Annotated[tuple[str, ...], arg(metavar="[RUN ...]")]] = (),
    host: str = "127.0.0.1",
    port: int = 8000,
    token_file: Path | None = None,
    insecure: bool = False,
    device: str = "auto",
    limits: Settings = Settings(),  # noqa: B008 (it is immutable)
) -> None:
    """Serves models over HTTP, with a page to try them out at /.

    Arguments:
        models: Run folders, folders of forecast --save, names of shipped models or hf://OWNER/NAME,
            each optionally after NAME=. By default the shipped models.
        host: The address to listen on; one that others can reach needs --token-file or --insecure.
        port: The port; 0 for any free port.
        token_file: A file with the token that clients must send.
        insecure: Serve without a token on an address that others can reach.
        device: Where to run: auto, cpu or cuda.
        limits: The limits of requests and of the server.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"port={port} is not allowed; use 0 to {2**16 - 1}")
    token = None if token_file is None else read_secret(token_file)
    settings = exposed_settings(limits, host, token is not None or insecure)
    if settings.threads is None:
        # Threads wait for each other: one that shares its core with the connections delays all.
        settings = replace(settings, threads=max(1, (os.cpu_count() or 2) - 1))
    served, forecasters = open_models(models, str(choose_device(device)))
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(f"cannot listen on host={host!r}, port={port}: {error}") from None
    app = create_app(served, settings, token, forecasters)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    config = uvicorn.Config(
        app,
        http="h11",
        h11_max_incomplete_event_size=_MAX_HEAD,
        ws="none",
        limit_concurrency=settings.max_connections,
        access_log=False,  # ours leaves out the content
        log_level="warning",
        timeout_keep_alive=math.ceil(settings.body_timeout),
        # As long as a request may take.
        timeout_graceful_shutdown=math.ceil(settings.body_timeout + settings.timeout),
        server_header=False,
    )
    shown = f"[{host}]" if ":" in host else host
    names, port = ", ".join(one.name for one in (*served, *forecasters)), listener.getsockname()[1]
    print(f"serving {names} at http://{shown}:{port}  (Ctrl-C ends)", flush=True)
    # Once it has drained, uvicorn sends itself the signal again; by then all is well.
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: sys.exit(0))
    server, worker = uvicorn.Server(config), app.state.worker
    worker.on_failure = lambda: setattr(server, "should_exit", True)  # so that it can be restarted
    gc.freeze()  # a collection of all of PyTorch's objects would stop every request for 0.4 s
    server.run(sockets=[listener])
    if worker.failure is not None:
        print(f"vssm: {worker.failure}", file=sys.stderr)
        sys.exit(1)


def exposed_settings(limits: Settings, host: str, guarded: bool) -> Settings:
    """Returns the limits. An address that others can reach needs a token; a server that only this
    machine can reach answers only to names of this machine.

    Example:
        >>> exposed_settings(Settings(), "127.0.0.2", guarded=False).hosts
        ('127.0.0.1', 'localhost', '::1', '127.0.0.2')
        >>> exposed_settings(Settings(), "0.0.0.0", guarded=False)
        Traceback (most recent call last):
        ValueError: host='0.0.0.0' can be reached by others; give --token-file FILE, or --insecure
    """
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if local:
        return replace(limits, hosts=tuple(dict.fromkeys((*_LOCAL, host))))
    if not guarded:
        raise ValueError(
            f"host={host!r} can be reached by others; give --token-file FILE, or --insecure"
        )
    return limits


def read_secret(path: Path) -> str:
    """Returns the secret in a file of one line."""
    if not path.exists():  # a pipe is as good as a file
        raise ValueError(f"token_file={str(path)!r} does not exist; give a file with the secret")
    secret = path.read_bytes().decode(errors="replace").strip()
    if not re.fullmatch(r"[!-~]{16,}", secret):
        raise ValueError(
            f"token_file={str(path)!r} holds no secret; use one word of 16 or more characters"
        )
    return secret
