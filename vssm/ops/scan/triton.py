"""The selective scan on a GPU: the Triton kernels of the `triton` backend, and their launches.

    h_t = a_t h_{t-1} + w_t B_t      y_t = C_t h_t + D u_t      out_t = y_t silu(z_t)
    a_t = exp(delta_t A)             w_t = delta_t u_t          delta_t = softplus(dt_t + dt_bias)

Backward, with g_t = dout_t silu(z_t) and l_t the gradient of h_t:

    l_t  = a_{t+1} l_{t+1} + C_t g_t                  p_t = a_t l_t h_{t-1}
    dB_t = sum_d w_t l_t     dC_t = sum_d g_t h_t     dw_t = sum_n B_t l_t
    du_t = delta_t dw_t + D g_t                       ddelta_t = u_t dw_t + sum_n A p_t
    dz_t = dout_t silu'(z_t) y_t                      dA = sum_t delta_t p_t, dD = sum_t g_t u_t

Shapes: u, dt, z, out (B, T, D); A (D, N); B, C (B, T, N); D, dt_bias (D,); h, l (B, D, N).

Forward, a thread owns whole channels and runs over time. The N states of a channel are N register
variables (a tuple of vectors over channels), so sums over n need no communication. Backward, and
forward with few sequences, PARTS lanes share the states of a channel. Everything is float32 inside;
exp is exp2 with A scaled by log2(e); addresses are 64-bit. A program is one warp, or several
independent ones, except that the warps of `_ring_kernel` copy for each other.

- `_scan_kernel` writes out, or summarises chunks of time: h at the end of a chunk is
  P h_start + local with P = exp(A sum delta). The gradient that a chunk hands back (a l of its
  first step) is P times the gradient handed to it plus
  pull = sum_t exp(A sum_{s <= t} delta_s) C_t g_t.
  `_combine_kernel` chains the chunks of a long sequence; then all chunks run side by side.
- `_lanes_kernel` writes out of few short sequences. Several lanes per channel fill the device
  without chunks, which would have to be run twice. Each lane of a channel loads one step in PARTS
  and does what does not depend on the states.
- `_ring_kernel` writes out of some long sequences, and of few that are not short, if they come in
  whole blocks. It copies inputs ahead into shared memory, because few warps would wait for them.
- `_pull_kernel` finds pull alone: it walks back, and needs no product of decays.
- `_scan_backward_kernel` runs a chunk forward and keeps h of every K-th step in shared memory (or
  in a scratch if it does not fit), then walks back K steps at a time with states in registers.
  Each lane of a channel loads one step in PARTS, does softplus and gate, and stores gradients.
  Sums over channels (dB, dC) leave as one partial per program, sums over time and batch (dA, dD,
  ddt_bias) too; PyTorch adds the partials. There are no atomics, so results repeat bit for bit.

If autograd records a forward that runs straight through time, the forward keeps h before every
chunk of the backward (`kept_shape`): with 16 states 2 bytes per channel and step, as much as u in
bfloat16. A program of the backward can then walk back over several chunks in a row, a span, and
only spans need a pull.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vssm.ops.scan.triton_backward import SHARED_BYTES, _scan_backward_kernel

from vssm.ops.scan.triton_forward import (  # isort: skip
    _combine_kernel, _lanes_kernel, _pull_kernel, _scan_kernel,
)  # fmt: skip
from vssm.ops.scan.triton_plans import (  # isort: skip
    Plan, plan_backward, plan_forward, plan_pull, plan_span, plan_summary,
)  # fmt: skip
from vssm.ops.scan.triton_ring import _ring_kernel

__all__ = ["backward", "forward", "forward_ahead", "kept_shape", "processors"]


def processors(device: torch.device) -> int:
    """Returns the number of multiprocessors; 2 in the interpreter, for tests of all branches."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def kept_shape(
    batch: int, length: int, channels: int, states: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, ...]:
    """Returns the shape of the states that `forward` keeps for `backward`, if a graph is recorded.

    It is (B, chunks of the backward, N, D), or (0,) if there is only one chunk or if the forward
    runs in chunks or with lanes. Strides do not count, because a trace does not know them.
    """
    sizes = (batch, length, channels, states, processors(device))
    chunk = plan_backward(*sizes).length
    if length <= chunk:
        return (0,)
    plan = plan_forward(*sizes, dtype.itemsize > 2)
    if plan.length < length or (plan.parts > 1 and not plan.ring):
        return (0,)
    return (batch, -(-length // chunk), states, channels)


def _aligned(tensor: Tensor, size: int) -> bool:
    """Returns whether all rows of a tensor start at multiples of a size in bytes."""
    steps = (tensor.stride(0), tensor.stride(1))
    starts = (tensor.data_ptr(), *(step * tensor.element_size() for step in steps))
    return all(start % size == 0 for start in starts)


def _ptx(tensor: Tensor) -> bool:
    # Triton's interpreter and GPUs of other makers have no PTX.
    return tensor.is_cuda and torch.version.cuda is not None


class Call(NamedTuple):
    """The tensors of a call as the kernels take them, and the methods that launch the kernels."""

    inputs: tuple  # dy, u, dt, A, B, C, D, z, dt_bias
    strides: tuple  # of batch and time, for dy, u, dt, B, C, z
    softplus: bool
    words: bool  # rows of B and C are whole, aligned 64-bit words

    @property
    def fixed_strides(self) -> tuple:
        """The strides, those of time compiled in: registers would cost 6 % more instructions."""
        length = self.inputs[1].shape[1]
        return tuple((row, tl.constexpr(step if length > 1 else 0)) for row, step in self.strides)

    @property
    def copies(self) -> bool:
        """Whether the inputs can be copied to shared memory 16 bytes at a time, for a ring."""
        _, u, dt, _, B, C, _, z, _ = self.inputs
        if u.is_cuda and not (_ptx(u) and torch.cuda.get_device_properties(u.device).major >= 8):
            return False
        vectors = [u, dt] if z is None else [u, dt, z]
        return all(
            first.dtype in (torch.float32, torch.bfloat16)
            and all(t.dtype == first.dtype and _aligned(t, 16) for t in (first, *others))
            for first, *others in (vectors, [B, C])
        )

    def settings(self, plan: Plan) -> dict:
        _, length, channels = self.inputs[1].shape
        states = self.inputs[3].shape[1] // plan.parts
        return {
            "N": states,
            "K": plan.K,
            "SOFTPLUS": self.softplus,
            "WORDS": self.words and states * self.inputs[4].element_size() % 8 == 0,
            "EVEN": channels * plan.parts % plan.BD == length % plan.K == plan.length % plan.K == 0,
            "PTX": _ptx(self.inputs[1]),
            "num_warps": plan.warps,
        } | ({} if plan.registers is None else {"maxnreg": plan.registers})

    def scan(self, plan: Plan, start, every=0, hold=False, **results: Tensor | None) -> None:
        """Runs `_scan_kernel` for the results that it is given room for."""
        dy, u, dt, A, B, C, D, z, dt_bias = self.inputs
        batch, length, channels = u.shape
        inputs = (None, u, dt, A, B, None, None, None, dt_bias)
        if "y" in results:
            inputs = (None, u, dt, A, B, C, D, z, dt_bias)
        elif results.get("pull") is not None:
            inputs = (dy, u, dt, A, B, C, None, z, dt_bias)
        chunks = triton.cdiv(length, plan.length)
        places = (results.get(name) for name in ("y", "end", "total", "local", "pull", "starts"))
        _scan_kernel[(batch * chunks * triton.cdiv(channels, plan.BD),)](
            inputs, self.fixed_strides, start, *places, length, channels, plan.length, chunks,
            LOG=(A.shape[1] - 1).bit_length(), BD=plan.BD, EVERY=every, AHEAD=plan.ahead,
            HOLD=hold, **self.settings(plan),
        )  # fmt: skip

    def pull(self, plan: Plan, total: Tensor, pull: Tensor) -> None:
        """Runs `_pull_kernel`."""
        dy, u, dt, A, _, C, _, z, dt_bias = self.inputs
        batch, length, channels = u.shape
        spans = triton.cdiv(length, plan.length)
        _pull_kernel[(batch * spans * triton.cdiv(channels, plan.BD),)](
            (dy, None, dt, A, None, C, None, z, dt_bias), self.fixed_strides, total, pull, length,
            channels, plan.length, spans, LOG=(A.shape[1] - 1).bit_length(), BD=plan.BD,
            AHEAD=plan.ahead, **self.settings(plan),
        )  # fmt: skip

    def scan_lanes(self, plan: Plan, start, y: Tensor, end: Tensor) -> None:
        """Runs `_lanes_kernel`."""
        batch, length, channels = self.inputs[1].shape
        _lanes_kernel[(batch * triton.cdiv(channels * plan.parts, plan.BD),)](
            self.inputs, self.fixed_strides, start, y, end, length, channels,
            LOG=plan.parts.bit_length() - 1, BD=plan.BD, **self.settings(plan),
        )  # fmt: skip

    def scan_ring(self, plan: Plan, start, y: Tensor, end: Tensor, every: int, starts) -> None:
        """Runs `_ring_kernel`."""
        batch, length, channels = self.inputs[1].shape
        settings = self.settings(plan)
        del settings["WORDS"], settings["EVEN"]  # a ring always has whole words and blocks
        _ring_kernel[(batch * channels * plan.parts // plan.BD,)](
            self.inputs, self.fixed_strides, start, y, end, starts, length, channels,
            LOG=plan.parts.bit_length() - 1, BD=plan.BD, EVERY=every, STAGES=plan.ring, **settings,
        )  # fmt: skip


def make_call(dy, u, dt, A, B: Tensor, C: Tensor, D, z, dt_bias, softplus: bool) -> Call:
    """Returns the call of some tensors, which may be parts of others: rows may be strided."""
    rows = [t if t is None or t.stride(2) == 1 else t.contiguous() for t in (dy, u, dt, B, C, z)]
    strides = tuple((0, 0) if t is None else (t.stride(0), t.stride(1)) for t in rows)
    dy, u, dt, B, C, z = rows  # pyright: ignore[reportAssignmentType]
    A, D, dt_bias = (None if t is None else t.contiguous() for t in (A, D, dt_bias))
    words = all(_aligned(t, 8) and t.shape[2] * t.element_size() % 8 == 0 for t in (B, C))
    return Call((dy, u, dt, A, B, C, D, z, dt_bias), strides, softplus, words)


def _floats(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _chain(term: Tensor, total: Tensor, A: Tensor, initial: Tensor | None, reverse: bool) -> None:
    """Turns the term of every chunk, in place, into the value that enters the chunk."""
    batch, chunks, channels, states = term.shape
    ahead = min(32, triton.next_power_of_2(chunks))
    _combine_kernel[(batch * triton.cdiv(A.numel(), 64),)](
        term, total, A, initial, channels, chunks,
        N=states, BLOCK=64, AHEAD=ahead, REVERSE=reverse, num_warps=1,
    )  # fmt: skip


def _enter_chunks(
    call: Call, length: int, h0: Tensor | None, dh: Tensor | None, few: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Returns h before every chunk and, given dh, l after it: (B, chunks, D, N) in float32."""
    u, A = call.inputs[1], call.inputs[3]
    batch, T, channels = u.shape
    chunks = triton.cdiv(T, length)
    total, local = _floats(u, batch, chunks, channels), _floats(u, batch, chunks, *A.shape)
    pull = None if dh is None else torch.empty_like(local)
    plan = plan_summary(length, A.shape[1], dh is not None, few, wide=u.element_size() > 2)
    call.scan(plan, None, total=total, local=local, pull=pull)
    _chain(local, total, A, h0, reverse=False)
    if pull is not None:
        _chain(pull, total, A, dh, reverse=True)
    return local, pull


def _leave_spans(call: Call, length: int, dh: Tensor | None) -> Tensor:
    """Returns l after every span of this many steps: (B, spans, D, N) in float32."""
    u, A = call.inputs[1], call.inputs[3]
    batch, T, channels = u.shape
    spans = triton.cdiv(T, length)
    total, pull = _floats(u, batch, spans, channels), _floats(u, batch, spans, *A.shape)
    call.pull(plan_pull(length, A.shape[1], wide=u.element_size() > 2), total, pull)
    _chain(pull, total, A, dh, reverse=True)
    return pull


def forward(
    u, dt, A, B, C, D, z, dt_bias, h0, softplus: bool, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns y (B, T, D) in the dtype of u, and the last state (B, D, N) in float32.

    kept is room for the states that `backward` can start from, in the shape of `kept_shape`.
    """
    batch, length, channels = u.shape
    y, end = torch.empty(u.shape, dtype=u.dtype, device=u.device), _floats(u, batch, *A.shape)
    if u.numel() == 0:
        return y, end.zero_() if h0 is None else end.copy_(h0)
    call = make_call(None, u, dt, A, B, C, D, z, dt_bias, softplus)
    sizes = (batch, length, channels, A.shape[1], processors(u.device), u.element_size() > 2)
    plan = plan_forward(*sizes)
    if plan.ring and not call.copies:
        plan = plan_forward(*sizes, copies=False, lanes=kept is None)
    start = None if h0 is None else h0.contiguous()
    if plan.length < length:
        start, _ = _enter_chunks(call, plan.length, start, None, few=plan.length <= 32)
    every = 0 if kept is None else plan_backward(*sizes[:5]).length
    if plan.ring:
        call.scan_ring(plan, start, y, end, every, kept)
    elif plan.parts > 1:
        call.scan_lanes(plan, start, y, end)
    else:
        call.scan(plan, start, every, y=y, end=end, starts=kept)
    return y, end


def forward_ahead(u, dt, A, B, C, D, z, dt_bias, h0) -> Tensor:
    """Returns y; the arguments are those of `scan_ahead`. Time is not cut into chunks."""
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    if u.numel():
        plan = Plan(2 * triton.cdiv(u.shape[1], 2), 32, 2, None, True)
        call = make_call(None, u, dt, A, B, C, D, z, dt_bias, True)
        call.scan(plan, None if h0 is None else h0.contiguous(), hold=True, y=y)
    return y


def backward(
    dy, dh, u, dt, A, B, C, D, z, dt_bias, h0, softplus: bool, kept: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Returns the gradients of u, dt, A, B, C, D, z, dt_bias, h0; empty if an argument is None.

    Without dh, the gradient of the last state is zero. kept is what `forward` kept, if anything.
    """
    batch, length, channels = u.shape
    states = A.shape[1]
    given = (u, dt, A, B, C, D, z, dt_bias, h0)
    grads = [u.new_empty(0) if t is None else t.new_empty(t.shape) for t in given]
    if u.numel() == 0:
        for grad in grads[:8]:
            grad.zero_()
        grads[8].zero_() if dh is None or h0 is None else grads[8].copy_(dh)
        return tuple(grads)
    call = make_call(dy, u, dt, A, B, C, D, z, dt_bias, softplus)
    plan = plan_backward(batch, length, channels, states, processors(u.device))
    chunks = triton.cdiv(length, plan.length)
    blocks = triton.cdiv(channels * plan.parts, plan.BD)
    most = max(1, plan.programs // blocks)
    each = 1  # chunks of a span
    start, adjoint = (None if t is None else t.contiguous() for t in (h0, dh))
    if chunks > 1 and kept is not None:
        start, each = kept, chunks
        if plan.split:
            each = plan_span(batch, chunks, most)
            adjoint = _leave_spans(call, each * plan.length, adjoint)
    elif chunks > 1:
        if adjoint is None:
            adjoint = _floats(u, batch, *A.shape).zero_()
        start, adjoint = _enter_chunks(call, plan.length, start, adjoint)
    spans = triton.cdiv(chunks, each)
    settings = call.settings(plan)
    settings["EVEN"] &= length % (2 * plan.K) == 0 and plan.length % (2 * plan.K) == 0
    groups = min(batch * spans, most)
    room = 2 * triton.cdiv(plan.length, 2 * plan.K) * settings["N"] * plan.BD
    # Without PTX, or if the states do not fit, a scratch takes the place of shared memory.
    shared = settings["PTX"] and settings["N"] % 4 == 0 and 4 * room <= SHARED_BYTES
    fold = plan.parts == 2 and states == 16
    # Exchanges in PTX need element i in lane i, which is certain only if all tensors have one axis.
    settings["PTX"] &= fold
    some = 16 // plan.parts  # states of a lane that one sum over lanes takes
    rounds = triton.cdiv(settings["N"], some)
    scratch = _floats(u, blocks * groups, 0 if shared else room)
    dBC = _floats(u, blocks, batch, length, rounds, 2, some, plan.parts)
    partial = _floats(u, groups, (states + 2) * channels)
    _scan_backward_kernel[(blocks * groups,)](
        call.inputs, call.fixed_strides, start, adjoint, scratch, grads[0], grads[1],
        None if z is None else grads[6], None if h0 is None else grads[8], dBC, partial,
        length, channels, plan.length, chunks, batch * spans, groups, spans, each,
        PARTS=plan.parts, FOLD=fold, TURNED=chunks > 1 and kept is not None, SHARED=shared,
        **settings,
    )  # fmt: skip
    sums = dBC.sum(0)
    if fold:  # the bits of a lane are bits 2, 0, 1 of the state, B or C, and bit 3 of the state
        sums = sums.view(batch, length, 2, 2, 2, 2, 2).permute(5, 0, 1, 6, 2, 4, 3).flatten(3)
    else:
        sums = sums.permute(3, 0, 1, 5, 2, 4).flatten(4)[..., : settings["N"]].flatten(3)
    dB, dC = sums.unbind(0)
    dA, dD, ddt_bias = partial.sum(0).split((states * channels, channels, channels))
    for index, grad in ((2, dA.view(channels, states)), (3, dB), (4, dC), (5, dD), (7, ddt_bias)):
        if given[index] is not None:
            grads[index].copy_(grad)
    return tuple(grads)
