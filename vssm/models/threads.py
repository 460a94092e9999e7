"""Threads of PyTorch in forked processes."""

import os
import warnings

__all__ = ["single_after_fork"]

_IMPORTED_IN = os.getpid()


def single_after_fork() -> None:
    """Keeps a forked process on one thread; to be called before computing.

    A child has none of its parent's threads, but GNU OpenMP believes that it has, and waits for
    them forever. PyTorch's DataLoader also uses one thread in its workers.
    """
    import torch

    if torch.compiler.is_compiling() or os.getpid() == _IMPORTED_IN:
        return
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        warnings.warn(
            "this process was forked, so PyTorch runs on one thread here; more would wait forever. "
            "To use more threads, start it with multiprocessing.get_context('spawn')",
            stacklevel=4,
        )
