"""`vssm serve` in one process, on uvicorn.

SIGTERM and Ctrl-C stop taking requests, finish what runs, including streams, and end the process.
If computing fails, the process ends with exit code 1.
"""

import gc
import ipaddress
import logging
import math
import os
import signal
import socket
import stat
import sys
from dataclasses import replace
from pathlib import Path

from vssm.serve.settings import ServeOptions, Settings

__all__ = ["drain_seconds", "exposed_settings", "read_secret", "read_secrets", "serve"]

_MAX_HEAD = 64 * 2**10  # bytes of a request before its body
_LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(options: ServeOptions) -> None:
    """Serves models until the process is told to stop."""
    host, port = options.host, options.port
    token, key = read_secrets(options)
    settings = exposed_settings(options, token)
    if not 0 <= port < 2**16:
        raise ValueError(f"port={port} is not allowed; allowed: 0 to 65535")
    try:
        import uvicorn

        from vssm.serve.app import create_app
        from vssm.serve.connections import limited_protocol
    except ImportError as error:
        raise ValueError(
            f"serving needs {error.name}; install it with: pip install 'vssm[serve]'"
        ) from None
    from vssm.checks import choose_device
    from vssm.serve.models import open_models

    if settings.threads is None:
        # Threads wait for each other: one that shares its core with the connections delays all.
        settings = replace(settings, threads=max(1, (os.cpu_count() or 2) - 1))
    models = open_models(options.models, str(choose_device(options.device)))
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(f"can not listen on host={host!r}, port={port}: {error}") from None
    app = create_app(models, settings, token, key)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    config = uvicorn.Config(
        app,
        http=limited_protocol(settings),
        h11_max_incomplete_event_size=_MAX_HEAD,
        ws="none",
        access_log=False,  # ours leaves out the content
        log_level="warning",
        timeout_graceful_shutdown=drain_seconds(settings),
        server_header=False,
    )
    shown = f"[{host}]" if ":" in host else host
    names, port = ", ".join(served.name for served in models), listener.getsockname()[1]
    print(f"serving {names} at http://{shown}:{port}  (Ctrl-C ends)", flush=True)
    # Once it has drained, uvicorn sends itself the signal again; by then all is well.
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: sys.exit(0))
    server, worker = uvicorn.Server(config), app.state.worker
    worker.on_failure = lambda: setattr(server, "should_exit", True)  # so that it can be restarted
    gc.collect()
    gc.freeze()  # a collection of all of PyTorch's objects would stop every request for 0.4 s
    try:
        server.run(sockets=[listener])
    finally:
        gc.unfreeze()
    if worker.failure is not None:
        print(f"vssm: {worker.failure}", file=sys.stderr)
        sys.exit(1)


def exposed_settings(options: ServeOptions, token: str | None) -> Settings:
    """Returns the limits. An address that others can reach needs a token; a server that only this
    machine can reach answers only to names of this machine.

    Example:
        >>> exposed_settings(ServeOptions(host="127.0.0.2"), None).hosts
        ('127.0.0.1', 'localhost', '::1', '127.0.0.2')
        >>> exposed_settings(ServeOptions(host="0.0.0.0"), None)
        Traceback (most recent call last):
        ValueError: host='0.0.0.0' can be reached by others; allowed: --token-file FILE...
    """
    host = options.host
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if local:
        return replace(options.limits, hosts=tuple(dict.fromkeys((*_LOCAL, host))))
    if token is None and not options.insecure:
        raise ValueError(
            f"host={host!r} can be reached by others; allowed: --token-file FILE, or --insecure"
        )
    return options.limits


def drain_seconds(settings: Settings) -> int:
    """Returns the longest time of a request: running ones get as long when the server ends."""
    return math.ceil(settings.body_timeout + settings.timeout)


def read_secrets(options: ServeOptions) -> tuple[str | None, bytes | None]:
    """Returns the token of clients and the key of sealed states."""
    token, key = options.token_file, options.key_file
    return (
        None if token is None else read_secret(token, "token_file"),
        None if key is None else read_secret(key, "key_file").encode(),
    )


def read_secret(path: Path, name: str) -> str:
    """Returns the secret in a file of one line."""
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
