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
        from vssm.serve.cluster import serve_on_ray
        from vssm.serve.run import serve

        if self.ray:
            serve_on_ray(self)
        elif self.replicas != 1 or self.max_replicas is not None:
            raise ValueError(
                "replicas and max_replicas are for --ray; allowed: with it, or without them"
            )
        else:
            serve(self)
