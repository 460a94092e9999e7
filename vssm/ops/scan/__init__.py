"""The selective scan: one function with three backends.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t          y_t = C_t h_t + D u_t

optionally with dt_t <- softplus(dt_t + dt_bias) before and y_t <- y_t silu(z_t) after.

| backend     | where        | how                                                         |
| ----------- | ------------ | ----------------------------------------------------------- |
| `reference` | anywhere     | a PyTorch loop, differentiated by autograd                  |
| `numba`     | CPU, float32 | compiled at first use, states in registers, none stored     |
| `triton`    | CUDA         | states in registers; long sequences are cut or shared       |

Shapes: u, dt, z, y (B, T, D); A (D, N); B, C (B, T, N); D, dt_bias (D,); h0, h (B, D, N).

The modules `vssm.ops.scan.numba` and `vssm.ops.scan.triton` have the functions `forward` and
`backward`. Here they become one operator of `torch.library`, which autograd, `torch.compile` and
`opcheck` know.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vssm.ops.dispatch import choose_backend, kernels, needs_operator

__all__ = ["scan_output", "selective_scan", "selective_scan_reference"]

_NAMES = ("u", "dt", "A", "B", "C", "D", "z", "dt_bias", "h0")


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
    """
    inputs = (u, dt, A, B, C, D, z, dt_bias, h0)
    return _run_scan(inputs, softplus, backend, last=True)


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
    """Returns y of `selective_scan` without computing the state after the last step.

    Neighbouring sequences may share a starting state: h0 may be (B / S, D, N), where each row is
    the starting state of S neighbouring sequences.

    Example:
        >>> u, dt = torch.ones(1, 3, 2), torch.ones(1, 3, 2)
        >>> A, B, C = -torch.ones(2, 1), torch.ones(1, 3, 1), torch.ones(1, 3, 1)
        >>> scan_output(u, dt, A, B, C)[0, :, 0]
        tensor([1.0000, 1.3679, 1.5032])
    """
    inputs = (u, dt, A, B, C, D, z, dt_bias, h0)
    return _run_scan(inputs, softplus, backend, last=False)[0]


def _run_scan(inputs: tuple, softplus: bool, backend: str, last: bool) -> tuple[Tensor, Tensor]:
    """Checks the arguments and runs the scan; without `last`, h0 may have fewer rows."""
    _check_arguments(inputs, shared=not last)
    u, h0 = inputs[0], inputs[8]
    backend = choose_backend(backend, u.device, u.dtype)
    direct = not needs_operator(*inputs)
    if backend == "triton" and direct:
        return kernels("scan", backend).forward(*inputs[:8], softplus, h0, last)
    if h0 is not None and len(h0) != len(u):
        inputs = (*inputs[:8], h0.repeat_interleave(len(u) // len(h0), 0))
    if backend == "numba":  # it takes float32 only; the Triton kernels take every dtype
        inputs = tuple([None if t is None else t.float() for t in inputs])
    u, dt, A, B, C, D, z, dt_bias, h0 = inputs
    if backend == "reference":
        return selective_scan_reference(u, dt, A, B, C, D, z, dt_bias, softplus, h0)
    if direct:  # the dispatcher costs tens of microseconds per call
        return kernels("scan", backend).forward(u, dt, A, B, C, D, z, dt_bias, softplus, h0)
    # An exported program must take other lengths, and the length decides what is kept.
    exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # PyTorch 2.7
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    keep = recorded and not exporting()
    return _scan(u, dt, A, B, C, D, z, dt_bias, softplus, h0, backend, keep)[:2]


def _check_arguments(inputs: tuple, shared: bool) -> None:
    """Raises `ValueError` if the arguments do not fit together."""
    for name, tensor in zip(_NAMES, inputs, strict=True):
        if tensor is None and name in _NAMES[5:]:
            continue
        if not isinstance(tensor, Tensor) or tensor.is_complex():
            found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} is {found}; allowed: a tensor of real numbers")
    u, _, A, *_, h0 = inputs
    if u.ndim != 3:
        raise ValueError(f"u has shape {tuple(u.shape)}; allowed: (batch, length, channels)")
    if not u.is_floating_point():
        raise ValueError(f"u has dtype {u.dtype}; allowed: a floating-point dtype")
    batch, length, channels = u.shape
    if A.ndim != 2 or A.shape[0] != channels or A.shape[1] < 1:
        raise ValueError(
            f"A has shape {tuple(A.shape)}; allowed: ({channels}, states) with states >= 1"
        )
    starts, states = batch, A.shape[1]
    if shared and h0 is not None and h0.ndim and len(h0) and batch % len(h0) == 0:
        starts = len(h0)
    vector, row, channel = (batch, length, channels), (batch, length, states), (channels,)
    shapes = (vector, vector, A.shape, row, row, channel, vector, channel, (starts, *A.shape))
    for name, tensor, shape in zip(_NAMES, inputs, shapes, strict=True):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; allowed: {shape}, to match u and A"
            )
        if tensor is not None and tensor.device != u.device:
            raise ValueError(f"{name} is on {tensor.device}; allowed: {u.device}, the device of u")


def selective_scan_reference(
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
) -> tuple[Tensor, Tensor]:
    """The plain PyTorch twin of `selective_scan`, for every device and floating dtype."""
    exact = torch.float64 if u.dtype == torch.float64 else torch.float32
    x, delta, A, B, C = (tensor.to(exact) for tensor in (u, dt, A, B, C))
    if dt_bias is not None:
        delta = delta + dt_bias.to(exact)
    if softplus:
        delta = F.softplus(delta)
    h = x.new_zeros(len(u), *A.shape) if h0 is None else h0.to(exact)
    drive = delta * x
    outputs = []
    # Unbound, because the gradient of an index would be a tensor of all steps for every step.
    steps = (tensor.unbind(1) for tensor in (delta, drive, B, C))
    for delta_t, drive_t, B_t, C_t in zip(*steps, strict=True):
        h = torch.exp(delta_t[..., None] * A) * h + drive_t[..., None] * B_t[:, None, :]
        outputs.append(torch.einsum("bdn,bn->bd", h, C_t))
    y = torch.stack(outputs, 1) if outputs else torch.zeros_like(x)
    if D is not None:
        y = y + D.to(exact) * x
    if z is not None:
        y = y * F.silu(z.to(exact))
    return y.to(u.dtype), h


def _kept_room(u: Tensor, A: Tensor, backend: str, keep: bool) -> Tensor:
    """Returns room for the states that backward starts from; empty if none are kept."""
    shape: tuple[int, ...] = (0,)
    if keep and backend == "triton":
        shape = kernels("scan", backend).kept_shape(*u.shape, A.shape[1], u.dtype, u.device)
    return u.new_empty(shape, dtype=torch.float32)


_INPUTS = (
    "Tensor u, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "bool softplus, Tensor? h0"
)


@torch.library.custom_op(
    "vssm::selective_scan",
    mutates_args=(),
    schema=f"({_INPUTS}, str backend, bool keep=True) -> (Tensor, Tensor, Tensor)",
)
def _scan(u, dt, A, B, C, D, z, dt_bias, softplus, h0, backend, keep=True):  # noqa: ANN001, ANN202
    """Returns y, the last state, and the states kept for backward, which have no gradient."""
    kept = _kept_room(u, A, backend, keep)
    options = {"kept": kept} if kept.numel() else {}
    run = kernels("scan", backend).forward
    return *run(u, dt, A, B, C, D, z, dt_bias, softplus, h0, **options), kept


@_scan.register_fake
def _(u, dt, A, B, C, D, z, dt_bias, softplus, h0, backend, keep=True):  # noqa: ANN001, ANN202
    y = torch.empty_like(u, memory_format=torch.contiguous_format)
    h = u.new_empty(u.shape[0], *A.shape, dtype=torch.float32)
    return y, h, _kept_room(u, A, backend, keep)


@torch.library.custom_op(
    "vssm::selective_scan_backward",
    mutates_args=(),
    schema=f"(Tensor dy, Tensor? dh, {_INPUTS}, Tensor kept, str backend) -> Tensor[]",
)
def _scan_backward(dy, dh, u, dt, A, B, C, D, z, dt_bias, softplus, h0, kept, backend):  # noqa: ANN001, ANN202
    """Returns the gradients of u, dt, A, B, C, D, z, dt_bias, h0; empty if an argument is None."""
    options = {"kept": kept} if kept.numel() else {}
    run = kernels("scan", backend).backward
    return list(run(dy, dh, u, dt, A, B, C, D, z, dt_bias, softplus, h0, **options))


@_scan_backward.register_fake
def _(dy, dh, u, dt, A, B, C, D, z, dt_bias, softplus, h0, kept, backend):  # noqa: ANN001, ANN202
    def like(tensor: Tensor | None) -> Tensor:
        return u.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    return [like(tensor) for tensor in (u, dt, A, B, C, D, z, dt_bias, h0)]


def _setup_context(ctx, inputs, output) -> None:  # noqa: ANN001
    *tensors, ctx.softplus, h0, ctx.backend, _ = inputs
    ctx.save_for_backward(*tensors, h0, output[2])
    ctx.mark_non_differentiable(output[2])
    # The last state often has no gradient, and one of zeros would be as large as the state.
    ctx.set_materialize_grads(False)


def _backward(ctx, dy: Tensor | None, dh: Tensor | None, _: None) -> tuple:  # noqa: ANN001
    *inputs, h0, kept = ctx.saved_tensors  # read once: checkpointing recomputes them at every read
    dy = torch.zeros_like(inputs[0]) if dy is None else dy
    found = _scan_backward(dy, dh, *inputs, ctx.softplus, h0, kept, ctx.backend)
    grads = [None if t is None else g for t, g in zip((*inputs, h0), found, strict=True)]
    return *grads[:8], None, grads[8], None, None


_scan.register_autograd(_backward, setup_context=_setup_context)
