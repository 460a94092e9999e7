"""The selective scan: one function with three backends.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t          y_t = C_t h_t + D u_t

optionally with dt_t <- softplus(dt_t + dt_bias) before and y_t <- y_t silu(z_t) after.

| backend     | where        | how                                                         |
| ----------- | ------------ | ----------------------------------------------------------- |
| `reference` | anywhere     | plain PyTorch, many steps at once if states are small       |
| `numba`     | CPU, float32 | compiled at first use, states in registers, none stored     |
| `triton`    | CUDA         | states in registers; long sequences are cut or shared       |

Shapes: u, dt, z, y (B, T, D); A (D, N); B, C (B, T, N); D, dt_bias (D,); h0, h (B, D, N).

The modules `vssm.ops.launch_numba` and `vssm.ops.scan.triton` have the functions `scan_forward`,
`scan_backward` and `scan_ahead`. The choice of a backend is that of all ops.
"""

import importlib
import importlib.util
import os
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from vssm.ops.operators import make_operator
from vssm.ops.scan.checks import check_starts, refuse
from vssm.ops.scan.reference import scan_packed_reference, selective_scan_reference

__all__ = [
    "BACKENDS",
    "HAS_TRITON",
    "choose_backend",
    "kernels_of",
    "needs_operator",
    "selective_scan",
]

BACKENDS = ("reference", "numba", "triton")
HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether the package `triton` is installed."""


def selective_scan(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
    h0: Tensor | None = None,
    backend: str = "auto",
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs the selective state space recurrence over a sequence.

    Arguments:
        u: The input, (B, T, D).
        dt: The step sizes, (B, T, D), before bias and softplus.
        A: The continuous-time decay, (D, N), negative.
        B: The input matrix of every step, (B, T, N).
        C: The output matrix of every step, (B, T, N).
        D: The skip connection, (D,).
        z: The gate, (B, T, D): y is multiplied by silu(z).
        dt_bias: Added to dt, (D,).
        softplus: Whether dt passes through softplus.
        h0: The state to start from, (B, D, N); zero if not given.
        backend: "auto", "reference", "numba" or "triton".
        cu_seqlens: Where sequences start that are packed one after the other into a batch of 1, and
            where the last one ends, (S + 1,) integers: (0, 5, 8) means steps 0 to 4 and 5 to 7. The
            state starts anew in each of them. Then B is 1, but h0 and the returned state are
            (S, D, N). It is read on the CPU: leave it there.

    Returns:
        y (B, T, D) in the dtype of u, and the state after the last step (B, D, N) in float32 (or
        float64). Gradients flow from both outputs to every tensor argument.

    Example:
        >>> u, dt = torch.ones(1, 3, 2), torch.ones(1, 3, 2)
        >>> A, B, C = -torch.ones(2, 1), torch.ones(1, 3, 1), torch.ones(1, 3, 1)
        >>> y, h = selective_scan(u, dt, A, B, C)
        >>> y[0, :, 0]
        tensor([1.0000, 1.3679, 1.5032])
        >>> _, first = selective_scan(u[:, :1], dt[:, :1], A, B[:, :1], C[:, :1])
        >>> rest, _ = selective_scan(u[:, 1:], dt[:, 1:], A, B[:, 1:], C[:, 1:], h0=first)
        >>> torch.equal(rest, y[:, 1:])
        True
        >>> packed, h = selective_scan(u, dt, A, B, C, cu_seqlens=torch.tensor([0, 1, 3]))
        >>> packed[0, :, 0], h.shape
        (tensor([1.0000, 1.0000, 1.3679]), torch.Size([2, 2, 1]))
    """
    inputs = (u, dt, A, B, C, D, z, dt_bias, h0)
    starts = None if cu_seqlens is None else check_starts(cu_seqlens, u)
    if not _fits(*inputs, rows=None if starts is None else len(starts) - 1):
        refuse(inputs, None if starts is None else len(starts) - 1)
    chosen = choose_backend(backend, u.device, u.dtype)
    if chosen == "reference":
        if starts is not None:
            return scan_packed_reference(inputs, softplus, starts)
        return selective_scan_reference(*inputs, softplus=softplus)
    if chosen == "numba":  # it takes float32 only; the Triton kernels take every dtype
        inputs = tuple([None if t is None else t.float() for t in inputs])
    if not needs_operator(*inputs):
        return kernels_of("scan", chosen).scan_forward(inputs, softplus, starts=starts)
    # An exported program must take other lengths, and the length decides what is kept.
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    keep = recorded and not torch.compiler.is_exporting()
    return _scan(*inputs, starts, softplus, chosen, keep)[:2]


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Returns the backend that will run; raises `ValueError` if the requested one cannot.

    "auto" takes `triton` on CUDA and `numba` for float32 on a CPU, if they can run, and `reference`
    otherwise.

    Example:
        >>> choose_backend("auto", torch.device("cpu"), torch.float64)
        'reference'
    """
    if backend == "auto":
        chosen = "triton" if device.type == "cuda" else "numba"
        return "reference" if _refusal(chosen, device, dtype) else chosen
    if backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} is unknown; choose from 'auto', {', '.join(map(repr, BACKENDS))}"
        )
    if backend != "reference" and (reason := _refusal(backend, device, dtype)):
        raise ValueError(
            f"backend={backend!r} cannot run here: {reason}; choose 'auto' or 'reference'"
        )
    return backend


def _refusal(backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why no kernel of a backend can run, or None if kernels can."""
    if backend == "numba":
        if device.type == "cpu" and dtype == torch.float32:
            return None
        return f"it runs float32 on a CPU, not {dtype} on {device.type}"
    if not HAS_TRITON:
        return "the package 'triton' is not installed (pip install 'vssm[gpu]')"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            f"it needs a CUDA device, not {device.type} (or TRITON_INTERPRET=1 for a slow test run)"
        )
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it runs float32, bfloat16 and float16, not {dtype}"
    return None


def needs_operator(*tensors: Tensor | None) -> bool:
    """Returns whether autograd or the compiler must see a kernel; calling it directly is faster."""
    return torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    )


def _fits(u, dt, A, B, C, D, z, dt_bias, h0, rows: int | None) -> bool:  # noqa: ANN001
    """Says quickly whether the arguments fit together; h0 has the batch of u, or so many rows."""
    try:
        size, device = u.shape, u.device
        batch, length, channels = size
        states = A.shape[1]
        row, channel = (batch, length, states), (channels,)
        given = [t for t in (u, dt, A, B, C, D, z, dt_bias, h0) if t is not None]
        return (
            u.is_floating_point()
            and states > 0
            and dt.shape == size
            and A.shape == (channels, states)
            and B.shape == C.shape == row
            and (D is None or D.shape == channel)
            and (z is None or z.shape == size)
            and (dt_bias is None or dt_bias.shape == channel)
            and (h0 is None or h0.shape == (batch if rows is None else rows, channels, states))
            and not [t for t in given if t.device != device or t.is_complex()]
        )
    except (AttributeError, IndexError, ValueError):  # not tensors, or of other dimensions
        return False


@cache
def kernels_of(op: str, backend: str) -> ModuleType:
    """Returns the module that starts the kernels of an op; it takes a second to load."""
    name = "launch_numba" if backend == "numba" else f"{op}.{backend}"
    return importlib.import_module(f"vssm.ops.{name}")


def _kept(u: Tensor, A: Tensor, starts: Tensor | None, backend: str, keep: bool) -> Tensor:
    """Returns room for the states that backward starts from; empty if none are kept."""
    shape: tuple[int, ...] = (0,)
    if keep and backend == "triton":
        sequences = 0 if starts is None else len(starts) - 1
        sizes = (*u.shape, A.shape[1], u.dtype, u.device, sequences)
        shape = kernels_of("scan", backend).kept_shape(*sizes)
    return torch.empty(shape, dtype=torch.float32, device=u.device)


def _forward(*arguments):  # noqa: ANN002, ANN202
    *inputs, starts, softplus, backend, keep = arguments
    kept = _kept(inputs[0], inputs[2], starts, backend, keep)
    room = kept if kept.numel() else None
    return *kernels_of("scan", backend).scan_forward(tuple(inputs), softplus, room, starts), kept


def _fake(u, dt, A, B, C, D, z, dt_bias, h0, starts, softplus, backend, keep):  # noqa: ANN001, ANN202
    sequences = len(u) if starts is None else len(starts) - 1
    y = torch.empty_like(u, memory_format=torch.contiguous_format)
    return (
        y,
        u.new_empty(sequences, *A.shape, dtype=torch.float32),
        _kept(u, A, starts, backend, keep),
    )


def _backward(dy, dh, *arguments):  # noqa: ANN001, ANN002, ANN202
    *inputs, starts, softplus, backend, _, kept = arguments
    dy = torch.zeros_like(inputs[0]) if dy is None else dy
    kept = kept if kept.numel() else None
    return kernels_of("scan", backend).scan_backward(dy, dh, tuple(inputs), softplus, kept, starts)


_scan = make_operator(
    "selective_scan",
    "Tensor u, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "Tensor? h0, Tensor? starts, bool softplus, str backend, bool keep",
    _forward,
    _backward,
    _fake,
    outputs=3,
    gradients=9,
    keeps=True,
)
