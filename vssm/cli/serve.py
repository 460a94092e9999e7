"""`vssm serve`: models over HTTP."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from vssm.serve.settings import Settings

__all__ = ["Serve"]


@dataclass
class Serve:
    """Serves models over HTTP, with a page to try them out at /."""

    models: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="[RUN ...]")]
    ] = ()
    """Run folders, names of shipped models or hf://OWNER/NAME, each optionally after NAME=. By
    default the shipped models."""
    host: str = "127.0.0.1"
    """The address to listen on; one that others can reach needs --token-file or --insecure."""
    port: int = 8000
    """The port; 0 for any that is free."""
    token_file: Path | None = None
    """A file with the token that clients must send."""
    insecure: bool = False
    """Serve on an address that others can reach without a token."""
    key_file: Path | None = None
    """A file with the secret that seals states which clients keep; by default they end with the
    process."""
    device: str = "auto"
    """Where to run: auto, cpu or cuda."""
    ray: bool = False
    """Serve on a Ray cluster."""
    replicas: int = 1
    """The least number of processes that compute (with --ray)."""
    max_replicas: int | None = None
    """The most processes that compute, as load asks for (with --ray)."""
    limits: Settings = field(default_factory=Settings)

    def run(self) -> None:
        from vssm.checks import choose_device
        from vssm.serve.run import read_secret, serve

        token = None if self.token_file is None else read_secret(self.token_file, "token_file")
        key = None if self.key_file is None else read_secret(self.key_file, "key_file").encode()
        device = str(choose_device(self.device))
        options = (self.host, self.port, self.limits, token, key, self.insecure, device)
        if self.ray:
            from vssm.serve.cluster import serve_on_ray

            serve_on_ray(self.models, *options, self.replicas, self.max_replicas)
        elif self.replicas != 1 or self.max_replicas is not None:
            raise ValueError(
                "replicas and max_replicas are for --ray; allowed: with it, or without them"
            )
        else:
            serve(self.models, *options)
