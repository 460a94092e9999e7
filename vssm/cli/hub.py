"""`vssm push` and `vssm pull`: models on the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from vssm.runs.hub import pull, push

_Run = Positional[Annotated[Path, arg(metavar="RUN")]]
_Repo = Positional[Annotated[str, arg(metavar="REPO")]]


def push_model(run: _Run, repo: _Repo, private: bool = False) -> None:
    """Uploads a model and its model card to the Hugging Face hub.

    Arguments:
        run: A run folder, or a folder written by vssm.save.
        repo: OWNER/NAME.
        private: Whether only you can see it.
    """
    print(f"pushed: {push(run, repo, private=private)}")


def pull_model(repo: _Repo) -> None:
    """Downloads a model from the Hugging Face hub and says where it is.

    Arguments:
        repo: OWNER/NAME, or OWNER/NAME@REVISION.
    """
    print(f"pulled: {pull(repo)}")
