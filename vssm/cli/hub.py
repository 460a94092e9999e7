"""`vssm push` and `vssm pull`: models on the Hugging Face hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

__all__ = ["Pull", "Push"]

_Repo = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="REPO")]]


@dataclass
class Push:
    """Uploads a model and its model card to the Hugging Face hub."""

    run_folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    """A run folder, or a folder written by vssm.save."""
    repo: _Repo
    """OWNER/NAME."""
    private: bool = False
    """Whether only you can see it."""

    def run(self) -> None:
        from vssm.runs.hub import push

        print(f"pushed: {push(self.run_folder, self.repo, private=self.private)}")


@dataclass
class Pull:
    """Downloads a model from the Hugging Face hub and says where it is."""

    repo: _Repo
    """OWNER/NAME, or OWNER/NAME@REVISION."""

    def run(self) -> None:
        from vssm.runs.hub import pull

        print(f"pulled: {pull(self.repo)}")
