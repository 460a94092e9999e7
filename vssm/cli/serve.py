"""`vssm serve`: models over HTTP."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from vssm.serve.settings import ServeOptions

__all__ = ["Serve"]


@dataclass
class Serve(ServeOptions):
    """Serves models over HTTP, with a page to try them out at /."""

    models: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="[RUN ...]")]
    ] = ()
    """Run folders, names of shipped models or hf://OWNER/NAME, each optionally after NAME=. By
    default the shipped models."""

    def run(self) -> None:
        from vssm.serve.run import serve

        serve(self)
