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

import importlib.util
import os
from functools import cache
from itertools import pairwise
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from vssm.ops.operators import make_operator

__all__ = [
    "BACKENDS",
    "check_starts",
    "choose_backend",
    "has_triton",
    "needs_operator",
    "scan_ahead",
    "selective_scan",
    "selective_scan_reference",
]

BACKENDS = ("reference", "numba", "triton")
_CHUNK = 256  # steps that the reference runs together, at most
_HAS_TRITON = importlib.util.find_spec("triton") is not None  # too slow to ask at every call
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
        _refuse(inputs, None if starts is None else len(starts) - 1)
    chosen = choose_backend(backend, u.device, u.dtype)
    if starts is None or chosen != "reference":
        return _run(inputs, softplus, chosen, starts)
    ys, hs = [u[:, :0]], [u.new_empty(0, *A.shape, dtype=_exact(u))]
    for i, (first, last) in enumerate(pairwise(starts.tolist())):
        own = [t if t is None or t.ndim < 3 else t[:, first:last] for t in inputs[:8]]
        y, h = _run((*own, None if h0 is None else h0[i : i + 1]), softplus, chosen)
        ys.append(y)
        hs.append(h)
    return torch.cat(ys, 1), torch.cat(hs)


def _run(
    inputs: tuple, softplus: bool, chosen: str, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Runs the scan of checked arguments by a backend; `reference` takes no packed sequences."""
    if chosen == "reference":
        return selective_scan_reference(*inputs, softplus=softplus)
    if chosen == "numba":  # it takes float32 only; the Triton kernels take every dtype
        inputs = tuple([None if t is None else t.float() for t in inputs])
    if not needs_operator(*inputs):
        return _kernels(chosen).scan_forward(inputs, softplus, starts=starts)
    # An exported program must take other lengths, and the length decides what is kept.
    exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # PyTorch 2.7
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    return _scan(*inputs, starts, softplus, chosen, recorded and not exporting())[:2]


def check_starts(cu_seqlens: Tensor, x: Tensor) -> Tensor:
    """Returns where the sequences start that are packed in x (1, T, D), and T: int64 on the CPU.

    Example:
        >>> check_starts([0, 3], torch.zeros(1, 3, 2))
        Traceback (most recent call last):
        ValueError: cu_seqlens must be a tensor of shape (S + 1,)
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.ndim != 1 or not len(cu_seqlens):
        raise ValueError("cu_seqlens must be a tensor of shape (S + 1,)")
    if cu_seqlens.is_floating_point() or cu_seqlens.is_complex():
        raise ValueError(f"cu_seqlens has dtype {cu_seqlens.dtype}; it must hold integers")
    if not isinstance(x, Tensor) or x.ndim != 3 or len(x) != 1:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"the input is {shape}; with cu_seqlens it must be (1, length, channels)")
    starts = cu_seqlens.detach().to("cpu", torch.int64).contiguous()
    values = starts.tolist()
    if values[0] != 0 or values[-1] != x.shape[1]:
        raise ValueError(
            f"cu_seqlens starts with {values[0]} and ends with {values[-1]}; "
            f"it must go from 0 to {x.shape[1]}, the length of the input"
        )
    for first, last in pairwise(values):
        if last <= first:
            raise ValueError(
                f"cu_seqlens does not rise: {first} is followed by {last}; "
                "every number must be larger than the one before"
            )
    return starts


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Returns the backend that will run; raises `ValueError` if the requested one can not.

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
            f"backend={backend!r} can not run here: {reason}; choose 'auto' or 'reference'"
        )
    return backend


def _refusal(backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why no kernel of a backend can run, or None if kernels can."""
    if backend == "numba":
        if device.type == "cpu" and dtype == torch.float32:
            return None
        return f"it runs float32 on a CPU, not {dtype} on {device.type}"
    if not has_triton():
        return "the package 'triton' is not installed (pip install 'vssm[gpu]')"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            f"it needs a CUDA device, not {device.type} (or TRITON_INTERPRET=1 for a slow test run)"
        )
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it runs float32, bfloat16 and float16, not {dtype}"
    return None


def has_triton() -> bool:
    """Returns whether the package `triton` is installed."""
    return _HAS_TRITON


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


def _refuse(inputs: tuple, sequences: int | None) -> None:
    """Raises a `ValueError` that says what does not fit together."""
    for name, tensor in zip(_NAMES, inputs, strict=True):
        if tensor is None and name in _NAMES[5:]:
            continue
        if not isinstance(tensor, Tensor) or tensor.is_complex():
            found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} is {found}; it must be a tensor of real numbers")
    u, A = inputs[0], inputs[2]
    if u.ndim != 3:
        raise ValueError(f"u has shape {tuple(u.shape)}; it must be (batch, length, channels)")
    if not u.is_floating_point():
        raise ValueError(f"u has dtype {u.dtype}; it must be a floating-point dtype")
    batch, length, channels = u.shape
    if A.ndim != 2 or A.shape[0] != channels or A.shape[1] < 1:
        raise ValueError(
            f"A has shape {tuple(A.shape)}; it must be ({channels}, states) with states >= 1"
        )
    vector, row, channel = u.shape, (batch, length, A.shape[1]), (channels,)
    state = (batch if sequences is None else sequences, *A.shape)
    shapes = (vector, vector, A.shape, row, row, channel, vector, channel, state)
    for name, tensor, shape in zip(_NAMES, inputs, shapes, strict=True):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; u and A ask for {tuple(shape)}"
            )
        if tensor is not None and tensor.device != u.device:
            raise ValueError(
                f"{name} is on {tensor.device}, but u is on {u.device}; move one of them"
            )


def selective_scan_reference(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    h0: Tensor | None,
    softplus: bool,
    ahead: bool = False,
) -> tuple[Tensor, Tensor]:
    """The plain PyTorch twin of `selective_scan` and, if `ahead`, of `scan_ahead`.

    The steps of a chunk are run together, in a number of operations that grows with the logarithm
    of their number. Nothing is divided by a product of decays, which may be too small.
    """
    exact = _exact(u)
    x, delta, A, B, C = (tensor.to(exact) for tensor in (u, dt, A, B, C))
    if dt_bias is not None:
        delta = delta + dt_bias.to(exact)
    if softplus:
        delta = F.softplus(delta)
    h = x.new_zeros(len(u), *A.shape) if h0 is None else h0.to(exact)
    drive, outputs = delta * x, [torch.zeros_like(x[:, :0])]
    size = _chunk_size(h, least=2 if ahead else 1)
    # Split, because the gradient of an index would be a tensor of all steps for every chunk.
    chunks = zip(*(tensor.split(size, 1) for tensor in (delta, drive, B, C)), strict=True)
    for delta_t, drive_t, B_t, C_t in chunks if x.shape[1] else ():
        a = torch.exp(delta_t[..., None] * A)
        b = drive_t[..., None] * B_t[:, :, None]
        if ahead:
            kept = torch.cat([h[:, None], _all_states(a[:, 1::2], b[:, 1::2], h)], 1)
            hs = a * kept.repeat_interleave(2, 1)[:, : a.shape[1]] + b
            h = kept[:, -1]
        else:
            hs = _all_states(a, b, h)
            h = hs[:, -1]
        outputs.append((hs @ C_t[..., None]).squeeze(3))
    y = torch.cat(outputs, 1)
    if D is not None:
        y = y + D.to(exact) * x
    if z is not None:
        y = y * F.silu(z.to(exact))
    return y.to(u.dtype), h


def _chunk_size(h: Tensor, least: int) -> int:
    """Returns how many steps run together: many if operations on one state h would be short."""
    together = 2**16 if h.device.type == "cpu" else 2**20  # numbers of an operation
    size = _CHUNK if torch.compiler.is_compiling() else together // max(1, h.numel())
    return least if size < 4 else min(_CHUNK, size // 2 * 2)


def _all_states(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """Returns h_t = a_t h_{t-1} + b_t of all steps, (B, T, D, N), from h (B, D, N) before them."""
    first = a[:, :1] * h[:, None] + b[:, :1]
    return _combine(a, torch.cat([first, b[:, 1:]], 1))


def _combine(a: Tensor, b: Tensor) -> Tensor:
    """Returns h_t = a_t h_{t-1} + b_t with h_0 = b_0. Pairs of steps are steps of a shorter run:

    h_{2k+1} = (a_{2k+1} a_{2k}) h_{2k-1} + (a_{2k+1} b_{2k} + b_{2k+1})
    """
    length = a.shape[1]
    if length <= 1:
        return b
    pairs = length // 2 * 2
    a_odd, b_odd = a[:, 1:pairs:2], b[:, 1:pairs:2]
    odd = _combine(a_odd * a[:, :pairs:2], a_odd * b[:, :pairs:2] + b_odd)
    even = a[:, 2::2] * odd[:, : (length - 1) // 2] + b[:, 2::2]
    even = torch.cat([b[:, :1], even], 1)
    both = torch.stack([even[:, : length // 2], odd], 2).flatten(1, 2)
    return both if length == pairs else torch.cat([both, even[:, -1:]], 1)


def _exact(u: Tensor) -> torch.dtype:
    return torch.float64 if u.dtype == torch.float64 else torch.float32


def scan_ahead(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    dt_bias: Tensor,
    h0: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Returns y of a scan, with softplus, of which only the odd steps change the state.

    Steps are counted from 0. The even steps are a second stream, which looks one step ahead
    (`vssm.sampling.ahead`). There is no gradient.

    Example:
        >>> u, A, one = torch.ones(1, 3, 1), -torch.ones(1, 1), torch.ones(1)
        >>> even, odd, after = scan_ahead(u, u, A, u, u, one, u, one)[0, :, 0]
        >>> bool(even == odd), bool(after > odd)
        (True, True)
    """
    inputs = (u, dt, A, B, C, D, z, dt_bias, h0)
    backend = choose_backend(backend, u.device, u.dtype)
    if backend == "reference":
        return selective_scan_reference(*inputs, softplus=True, ahead=True)[0]
    if backend == "numba":
        inputs = tuple([None if t is None else t.float() for t in inputs])
    return _kernels(backend).scan_ahead(inputs)


@cache
def _kernels(backend: str) -> ModuleType:
    # Imported at first use, because numba and triton take a second to load.
    if backend == "numba":
        from vssm.ops import launch_numba as kernels
    else:
        from vssm.ops.scan import triton as kernels
    return kernels


def _kept(u: Tensor, A: Tensor, starts: Tensor | None, backend: str, keep: bool) -> Tensor:
    """Returns room for the states that backward starts from; empty if none are kept."""
    shape: tuple[int, ...] = (0,)
    if keep and backend == "triton":
        sequences = 0 if starts is None else len(starts) - 1
        sizes = (*u.shape, A.shape[1], u.dtype, u.device, sequences)
        shape = _kernels(backend).kept_shape(*sizes)
    return torch.empty(shape, dtype=torch.float32, device=u.device)


def _forward(*arguments):  # noqa: ANN002, ANN202
    *inputs, starts, softplus, backend, keep = arguments
    kept = _kept(inputs[0], inputs[2], starts, backend, keep)
    room = kept if kept.numel() else None
    return *_kernels(backend).scan_forward(tuple(inputs), softplus, room, starts), kept


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
    return _kernels(backend).scan_backward(dy, dh, tuple(inputs), softplus, kept, starts)


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
