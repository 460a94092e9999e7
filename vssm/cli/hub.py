"""`vssm push` and `vssm pull`: models on the Hugging Face hub."""

from pathlib import Path

from tyro.conf import Positional

from vssm.runs.hub import pull, push

__all__ = ["pull_model", "push_model"]


def push_model(run: Positional[Path], repo: Positional[str], private: bool = False) -> None:
    """Uploads a model and its model card to the Hugging Face hub.

    Arguments:
        run: A run folder, or a folder written by vssm.save.
        repo: OWNER/NAME.
        private: Whether only you can see it.
    """
    print(f"pushed: {push(run, repo, private=private)}")


def pull_model(repo: Positional[str]) -> None:
    """Downloads a model from the Hugging Face hub and says where it is.

    Arguments:
        repo: OWNER/NAME, or OWNER/NAME@REVISION.
    """
    print(f"pulled: {pull(repo)}")
