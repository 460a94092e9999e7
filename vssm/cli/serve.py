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
    """Run folders, folders of forecast --save, names of shipped models or hf://OWNER/NAME, each
    optionally after NAME=. By default the shipped models."""
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
    limits: Settings = field(default_factory=Settings)

    def run(self) -> None:
        try:
            from vssm.serve.run import serve
        except ImportError as error:
            raise ValueError(
                f"serving needs {error.name}; install it with: pip install 'vssm[serve]'"
            ) from None
        serve(**vars(self))
