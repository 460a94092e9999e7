"""The selective scan: one function, three backends with one signature.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t          y_t = C_t h_t + D u_t

optionally with dt_t <- softplus(dt_t + dt_bias) before and y_t <- y_t silu(z_t) after.

| backend     | where        | how                                                        |
| ----------- | ------------ | ---------------------------------------------------------- |
| `reference` | anywhere     | a PyTorch loop, differentiated by autograd                 |
| `numba`     | CPU, float32 | compiled at first use, states in registers, no stored states |
| `triton`    | CUDA         | the same idea on a GPU                                     |

Shapes: u, dt, z, y (B, T, D); A (D, N); B, C (B, T, N); D, dt_bias (D,); h0, h (B, D, N).

The two kernel backends each offer `forward` and `backward`; here they become one operator of
`torch.library`, so that autograd, `torch.compile` and `opcheck` know it.
"""

import importlib
import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor

from vssm.ops.scan.reference import selective_scan_reference

__all__ = ["BACKENDS", "choose_backend", "scan_output", "selective_scan"]

BACKENDS = ("reference", "numba", "triton")
_NAMES = ("u", "dt", "A", "B", "C", "D", "z", "dt_bias", "h0")
_KERNELS = {"numba": "vssm.ops.scan.numba", "triton": "vssm.ops.scan.triton"}


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Returns the backend that will run; raises `ValueError` when the one asked for can not.

    "auto" takes `triton` on CUDA, `numba` for float32 on a CPU and `reference` otherwise.

    >>> choose_backend("auto", torch.device("cpu"), torch.float64)
    'reference'
    """
    if backend == "auto":
        if device.type == "cuda" and _triton_refusal(device, dtype) is None:
            return "triton"
        return "numba" if device.type == "cpu" and dtype == torch.float32 else "reference"
    if backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} is unknown; allowed: 'auto', {', '.join(map(repr, BACKENDS))}"
        )
    refusal = None
    if backend == "numba" and (device.type != "cpu" or dtype != torch.float32):
        refusal = f"it runs float32 on a CPU, not {dtype} on {device.type}"
    if backend == "triton":
        refusal = _triton_refusal(device, dtype)
    if refusal:
        raise ValueError(
            f"backend={backend!r} can not run here: {refusal}; allowed: 'auto', 'reference'"
        )
    return backend


def _triton_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Says why the Triton kernels can not run, or None when they can."""
    if (
        importlib.util.find_spec("vssm.ops.scan.triton") is None
        or importlib.util.find_spec("triton") is None
    ):
        return "the package 'triton' is not installed (pip install 'vssm[gpu]')"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            f"it needs a CUDA device, not {device.type} (or TRITON_INTERPRET=1 for a slow test run)"
        )
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it runs float32, bfloat16 and float16, not {dtype}"
    return None


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

    Returns:
        y (B, T, D) in the dtype of u, and the state after the last step (B, D, N) in float32 (or float64).
        Gradients flow from both outputs to every tensor argument.

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
    """
    return _chosen(u, dt, A, B, C, D, z, dt_bias, softplus, h0, backend, True)


def scan_output(
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
) -> Tensor:
    """Returns y of `selective_scan`, for sequences that share where they start and that nobody goes on from.

    The state after the last step is not written. h0 may have fewer rows, (B / S, D, N): each is where S
    neighbouring sequences start.

    Example:
        >>> u, dt = torch.ones(1, 3, 2), torch.ones(1, 3, 2)
        >>> A, B, C = -torch.ones(2, 1), torch.ones(1, 3, 1), torch.ones(1, 3, 1)
        >>> scan_output(u, dt, A, B, C)[0, :, 0]
        tensor([1.0000, 1.3679, 1.5032])
    """
    return _chosen(u, dt, A, B, C, D, z, dt_bias, softplus, h0, backend, False)[0]


def _chosen(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    softplus: bool,
    h0: Tensor | None,
    backend: str,
    last: bool,
) -> tuple[Tensor, Tensor]:
    """Checks the arguments and runs the chosen backend.

    `last` says whether the last state is asked for; if not, h0 may have fewer rows.
    """
    _check_arguments(u, dt, A, B, C, D, z, dt_bias, h0, shared=not last)
    backend = choose_backend(backend, u.device, u.dtype)
    tensors = (u, dt, A, B, C, D, z, dt_bias, h0)
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    direct = not torch.compiler.is_compiling() and not recorded
    if backend == "triton" and direct:
        return _kernels(backend).forward(u, dt, A, B, C, D, z, dt_bias, softplus, h0, last)
    if h0 is not None and len(h0) != len(u):
        h0 = h0.repeat_interleave(len(u) // len(h0), 0)
    if backend == "reference":
        return selective_scan_reference(u, dt, A, B, C, D, z, dt_bias, softplus, h0)
    if backend == "numba":  # knows float32 only; the triton kernels read every dtype as it is
        u, dt, A, B, C = (t.float() for t in (u, dt, A, B, C))
        D, z, dt_bias, h0 = (None if t is None else t.float() for t in (D, z, dt_bias, h0))
    if not direct:
        # An exported program is to take other sizes than it was traced with, which decide what is kept.
        exporting = getattr(
            torch.compiler, "is_exporting", torch.compiler.is_compiling
        )  # PyTorch 2.7
        keep = recorded and not exporting()
        y, h, _ = _scan(u, dt, A, B, C, D, z, dt_bias, softplus, h0, backend, keep)
        return y, h
    # The dispatcher costs tens of microseconds a call, which a step-by-step loop would feel.
    return _kernels(backend).forward(u, dt, A, B, C, D, z, dt_bias, softplus, h0)


def _check_arguments(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    h0: Tensor | None,
    shared: bool = False,
) -> None:
    for name, tensor in zip(_NAMES, (u, dt, A, B, C, D, z, dt_bias, h0), strict=True):
        if (tensor is None and name in _NAMES[5:]) or (
            isinstance(tensor, Tensor) and not tensor.is_complex()
        ):
            continue
        told = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name} is {told}; allowed: a tensor of real numbers")
    if u.ndim != 3:
        raise ValueError(f"u has shape {tuple(u.shape)}; allowed: (batch, length, channels)")
    batch, length, channels = u.shape
    if A.ndim != 2 or A.shape[0] != channels or A.shape[1] < 1:
        raise ValueError(
            f"A has shape {tuple(A.shape)}; allowed: ({channels}, states) with states >= 1"
        )
    states = A.shape[1]
    starts = batch
    if shared and h0 is not None and h0.ndim and len(h0) and batch % len(h0) == 0:
        starts = len(h0)
    expected = (
        ("dt", dt, (batch, length, channels)),
        ("B", B, (batch, length, states)),
        ("C", C, (batch, length, states)),
        ("D", D, (channels,)),
        ("z", z, (batch, length, channels)),
        ("dt_bias", dt_bias, (channels,)),
        ("h0", h0, (starts, channels, states)),
    )
    for name, tensor, shape in expected:
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; allowed: {shape}, to match u and A"
            )
        if tensor is not None and tensor.device != u.device:
            raise ValueError(f"{name} is on {tensor.device}; allowed: {u.device}, the device of u")
    if A.device != u.device:
        raise ValueError(f"A is on {A.device}; allowed: {u.device}, the device of u")
    if not u.is_floating_point():
        raise ValueError(f"u has dtype {u.dtype}; allowed: a floating-point dtype")


def _kernels(backend: str) -> ModuleType:
    # Imported at first use: numba and triton take a second to load and not everybody needs them.
    return importlib.import_module(_KERNELS[backend])


def _room(u: Tensor, A: Tensor, backend: str, keep: bool) -> Tensor:
    """Returns room for the states that backward starts from; empty if none are kept."""
    shape: tuple[int, ...] = (0,)
    if keep and backend == "triton":
        shape = _kernels(backend).kept_shape(*u.shape, A.shape[1], u.dtype, u.device)
    return u.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("vssm::selective_scan", mutates_args=())
def _scan(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    softplus: bool,
    h0: Tensor | None,
    backend: str,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y, the last state and, if some are to be kept for backward, states; no gradient of these."""
    kept = _room(u, A, backend, keep)
    options = {"kept": kept} if kept.numel() else {}
    y, h = _kernels(backend).forward(u, dt, A, B, C, D, z, dt_bias, softplus, h0, **options)
    return y, h, kept


@_scan.register_fake
def _(u, dt, A, B, C, D, z, dt_bias, softplus, h0, backend, keep=True):  # noqa: ANN001, ANN202
    batch, _, channels = u.shape
    y = torch.empty_like(u, memory_format=torch.contiguous_format)
    h = u.new_empty(batch, channels, A.shape[1], dtype=torch.float32)
    return y, h, _room(u, A, backend, keep)


@torch.library.custom_op("vssm::selective_scan_backward", mutates_args=())
def _scan_backward(
    dy: Tensor,
    dh: Tensor | None,
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    softplus: bool,
    h0: Tensor | None,
    kept: Tensor,
    backend: str,
) -> list[Tensor]:
    """Returns the gradients of u, dt, A, B, C, D, z, dt_bias, h0; empty for an argument not given."""
    options = {"kept": kept} if kept.numel() else {}
    grads = _kernels(backend).backward(
        dy, dh, u, dt, A, B, C, D, z, dt_bias, softplus, h0, **options
    )
    given = (u, dt, A, B, C, D, z, dt_bias, h0)
    return [u.new_empty(0) if t is None else grad for t, grad in zip(given, grads, strict=True)]


@_scan_backward.register_fake
def _(dy, dh, u, dt, A, B, C, D, z, dt_bias, softplus, h0, kept, backend):  # noqa: ANN001, ANN202
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format)
        if t is not None
        else u.new_empty(0)
        for t in (u, dt, A, B, C, D, z, dt_bias, h0)
    ]


def _setup_context(ctx, inputs, output) -> None:  # noqa: ANN001
    *tensors, softplus, h0, backend, _ = inputs
    ctx.save_for_backward(*tensors, h0, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.softplus, ctx.backend = softplus, backend
    # The last state often has no gradient: one of zeros would be as large as the state.
    ctx.set_materialize_grads(False)


def _backward(ctx, dy: Tensor | None, dh: Tensor | None, _: None) -> tuple:  # noqa: ANN001
    u, dt, A, B, C, D, z, dt_bias, h0, kept = ctx.saved_tensors
    dy = torch.zeros_like(u) if dy is None else dy
    grads = _scan_backward(
        dy, dh, u, dt, A, B, C, D, z, dt_bias, ctx.softplus, h0, kept, ctx.backend
    )
    given = [
        grad if tensor is not None else None
        for grad, tensor in zip(grads, (u, dt, A, B, C, D, z, dt_bias, h0), strict=True)
    ]
    return *given[:8], None, given[8], None, None


_scan.register_autograd(_backward, setup_context=_setup_context)
