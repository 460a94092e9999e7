"""Kernels that start while the one before them still runs: programmatic dependent launch.

Generation of few steps is a row of short kernels, between which the device would idle while the next one is
launched and gets going. A kernel that is launched with `early` starts when all programs of the one before
have called `_enter` or have ended. Until then it may compute addresses and prefetch weights; its own `_enter`
waits for the end of the kernel before, when all that this one wrote can be seen. The rules:

- Nothing is loaded or stored before `_enter`. Memory is used again: a store that is too early would change
  what an earlier kernel still reads.
- All kernels that let the next one start wait themselves: so the end of one is the end of all before it.
- Weights are fetched ahead into the L2 cache only (`_prefetch`), which never holds anything but what memory
  holds: a weight that was changed just before is read as it is.

Kernels of PyTorch in between are launched as always: they start when all before them has ended.
"""

# Kernels are written in the part of Python that Triton compiles.
# ruff: noqa: ANN001, ANN202
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from functools import lru_cache

import torch
import triton
import triton.language as tl

__all__ = ["LINE", "early"]

EARLY = True
"""Whether kernels start early where the device can do it; False gives the same results, later."""
JOINED = True
"""Whether this goes for kernels that wait for a second stream too."""
LINE = tl.constexpr(32)
"""Numbers of float32 in 128 bytes, which one prefetch fetches."""


@triton.jit
def _enter(EARLY: tl.constexpr):
    """Lets the next kernel start, and waits for the one before."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _prefetch(pointers):
    """Fetches the 128 bytes that each of the pointers is in into the L2 cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


def early(device: torch.device, joined: bool = False) -> dict[str, bool]:
    """Returns the settings of a launch: the constant EARLY of the kernel, and how it is launched.

    `joined` says that the kernel may read what a second stream has written.
    """
    if EARLY and (JOINED or not joined) and device.type == "cuda" and _capable(device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@lru_cache
def _capable(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)
