"""`vssm serve --ray`: the same app in many processes, on Ray Serve.

Every replica has its own worker, which batches requests of one shape; Ray's own batching knows no
shapes. States are sealed and stay with the clients, so that any replica can continue from them,
also after the replica that began is gone.
"""

import logging
import os
import secrets
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vssm.checks import choose_device
from vssm.serve.run import drain_seconds, exposed_settings, read_secrets
from vssm.serve.settings import ServeOptions, Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["create_replica", "serve_on_ray"]


def serve_on_ray(options: ServeOptions) -> None:
    """Serves models on the Ray cluster at $RAY_ADDRESS, or on this machine, until told to stop."""
    host, port, replicas, most = options.host, options.port, options.replicas, options.max_replicas
    token, key = read_secrets(options)
    settings = exposed_settings(options, token)
    if replicas < 1 or (most is not None and most < replicas):
        raise ValueError(
            f"replicas={replicas}, max_replicas={most} is not allowed; "
            "allowed: 1 <= replicas <= max_replicas"
        )
    if not 0 < port < 2**16:
        raise ValueError(f"port={port} is not allowed; allowed: 1 to 65535")
    try:
        import fastapi  # noqa: F401
        import ray
        from ray import serve
    except ImportError as error:
        raise ValueError(
            f"serving on Ray needs {error.name}; install it with: pip install 'vssm[serve,cluster]'"
        ) from None
    from vssm.serve.models import open_models

    # Opened here once, so that mistakes are reported here and not in replicas.
    names = ", ".join(served.name for served in open_models(options.models))
    places = [_absolute(source) for source in options.models]
    device = str(choose_device(options.device))
    limits = replace(settings, keep="client", handles=False)
    secret = key or secrets.token_bytes(32)

    def build() -> "FastAPI":
        return create_replica(places, device, limits, token, secret)

    scale: dict[str, Any] = {"num_replicas": replicas}
    if most is not None:
        scale = {"autoscaling_config": {"min_replicas": replicas, "max_replicas": most}}
    deployment = serve.deployment(
        serve.ingress(build)(),
        name="vssm",
        max_ongoing_requests=limits.max_queue,
        max_queued_requests=limits.max_queue,
        graceful_shutdown_timeout_s=drain_seconds(limits),
        health_check_period_s=2,
        health_check_timeout_s=10,
        ray_actor_options={"num_cpus": 1, "num_gpus": int(device != "cpu")},
        **scale,
    )
    logging.getLogger("ray").setLevel(logging.WARNING)
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    stop = threading.Event()
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(deployment.bind(), name="vssm", route_prefix="/")
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {names} at http://{shown}:{port} on Ray  (Ctrl-C ends)", flush=True)
        for name in (signal.SIGTERM, signal.SIGINT):  # replaces Ray's own handlers
            signal.signal(name, lambda *_: stop.set())
        while not stop.wait(1):  # an endless wait would not see signals
            pass
    finally:
        serve.shutdown()
        ray.shutdown()


def create_replica(
    places: Sequence[str], device: str, limits: Settings, token: str | None, secret: bytes
) -> "FastAPI":
    """Returns the app of a replica. If computing fails, its process ends; Ray starts another."""
    from vssm.serve.app import create_app
    from vssm.serve.models import open_models

    app = create_app(open_models(places, device), limits, token, secret)
    # After a second, so that waiting clients are told first.
    app.state.worker.on_failure = lambda: threading.Timer(1, os._exit, [1]).start()
    return app


def _absolute(source: str) -> str:
    name, separator, place = source.rpartition("=")
    path = Path(place)
    return f"{name}{separator}{path.resolve()}" if path.exists() else source
