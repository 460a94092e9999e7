"""The selective scan on a GPU: Triton kernels for the `triton` backend of `selective_scan`.

    h_t = a_t h_{t-1} + w_t B_t      y_t = C_t h_t + D u_t      out_t = y_t silu(z_t)
    a_t = exp(delta_t A)             w_t = delta_t u_t          delta_t = softplus(dt_t + dt_bias)

Backward, with g_t = dout_t silu(z_t) and l_t the gradient of h_t:

    l_t  = a_{t+1} l_{t+1} + C_t g_t                  p_t = a_t l_t h_{t-1}
    dB_t = sum_d w_t l_t     dC_t = sum_d g_t h_t     dw_t = sum_n B_t l_t     dA = sum_t delta_t p_t
    du_t = delta_t dw_t + D g_t                       ddelta_t = u_t dw_t + sum_n A p_t
    dz_t = dout_t silu'(z_t) y_t                      dD = sum_t g_t u_t

Shapes: u, dt, z, out (B, T, D); A (D, N); B, C (B, T, N); D, dt_bias (D,); h, l (B, D, N).

Forward, a thread owns whole channels and runs over time: the N states of a channel are N register variables
(a tuple of vectors over channels), so sums over n cost no communication. Backward, and forward where there
are few sequences, PARTS lanes share the states of a channel. All is float32 inside; exp is exp2 with A scaled
by log2(e), forward of some states by a polynomial, since the unit for it is what binds; addresses are 64-bit.
A program is one warp, or some that do not know of each other but for what `_ring_kernel` copies for all.

- `_scan_kernel` writes out, or the states before every so many steps, or summarises a chunk of time: h at its
  end is P h_start + local with P = exp(A sum delta), and the gradient that it hands back, a l of its first
  step, is P times the one handed to it + pull with pull = sum_t exp(A sum_{s <= t} delta_s) C_t g_t. One exp
  serves both. `_combine_kernel` chains the chunks of a long sequence; then all can run side by side.
- `_lanes_kernel` writes out of few sequences: chunks would have to be run twice, and many lanes fill the
  device without them. Of every PARTS steps each lane of a channel loads one and does what is not per state.
- `_ring_kernel` writes out of some long sequences, and of few that are not short, that come in whole blocks:
  it copies ahead into shared memory what few warps would wait for, and so runs once over what chunks would
  run over twice.
- `_pull_kernel` finds pull alone: it walks back, and so needs no product of decays.
- `_scan_backward_kernel` runs a chunk forward and keeps h of every K-th step in shared memory (in a scratch
  if it does not fit), then walks back K steps at a time with their states in registers. Of every PARTS
  steps each lane of a channel loads one, does what is not per state (softplus, gate) and stores its
  gradients; `_share` and `_gather` pass on what the other lanes need. Sums over channels (dB, dC) leave as
  one partial for the channels of a program, sums over time and batch (dA, dD, ddt_bias) as one per program;
  PyTorch adds the partials. No atomics: results repeat bit for bit.

Where a forward that autograd records runs straight through time, it keeps h before every chunk of the
backward (`kept_shape`), which need not find them again: with 16 states 2 bytes a channel and step until then,
as much as u takes in bfloat16. A program of the backward can then walk back over several chunks in a row, a
span, and only spans need a pull.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vssm.ops.scan.triton_backward import _scan_backward_kernel
from vssm.ops.scan.triton_forward import (
    _combine_kernel,
    _decays_kernel,
    _lanes_kernel,
    _pull_kernel,
    _scan_kernel,
)
from vssm.ops.scan.triton_lanes import SHARED_BYTES
from vssm.ops.scan.triton_plans import (
    Plan,
    plan_backward,
    plan_forward,
    plan_pull,
    plan_span,
    plan_starts,
    plan_summary,
)
from vssm.ops.scan.triton_ring import _ring_kernel

__all__ = ["backward", "decays", "forward", "kept_shape"]


def _processors(device: torch.device) -> int:
    # The interpreter has no multiprocessors; two make small tests take every branch.
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 2
    )


def kept_shape(
    batch: int, length: int, channels: int, states: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, ...]:
    """Returns the shape of the states that `forward` keeps for `backward`, if a graph is recorded.

    It is (B, chunks of the backward, N, D), or (0,) where there is one chunk only and where the forward runs
    in chunks or with lanes that share a channel. Strides do not count: a trace does not know them.
    """
    sizes = (batch, length, channels, states, _processors(device))
    chunk = plan_backward(*sizes).length
    if length <= chunk:
        return (0,)
    plan = plan_forward(*sizes, dtype.itemsize > 2)
    if plan.length < length or (plan.parts > 1 and not plan.ring):
        return (0,)
    return (batch, -(-length // chunk), states, channels)


def _words(*tensors: Tensor) -> bool:
    """Says whether the rows of the tensors are whole, aligned 64-bit words."""
    return all(
        t.data_ptr() % 8 == 0
        and all(size * t.element_size() % 8 == 0 for size in (t.stride(0), t.stride(1), t.shape[2]))
        for t in tensors
    )


def _ptx(tensor: Tensor) -> bool:
    # Triton's interpreter and other makers' GPUs know no PTX.
    return tensor.is_cuda and torch.version.cuda is not None


def _pieces(*tensors: Tensor | None) -> bool:
    """Says whether the rows of the tensors are of one dtype that a ring takes and start at whole 16 bytes."""
    given = [t for t in tensors if t is not None]
    return given[0].dtype in (torch.float32, torch.bfloat16) and all(
        t.dtype == given[0].dtype
        and t.data_ptr() % 16 == 0
        and all(size * t.element_size() % 16 == 0 for size in (t.stride(0), t.stride(1)))
        for t in given
    )


class _Call(NamedTuple):
    """The tensors as the kernels take them (dy, u, dt, A, B, C, D, z, dt_bias) and what depends on them."""

    inputs: tuple
    strides: tuple
    softplus: bool
    words: bool

    @property
    def fixed_strides(self) -> tuple:
        """Strides of which those of time are compiled in: in registers they cost 6 % more instructions."""
        length = self.inputs[1].shape[1]
        return tuple((row, tl.constexpr(step if length > 1 else 0)) for row, step in self.strides)

    @property
    def copies(self) -> bool:
        """Says whether the inputs can be copied to shared memory 16 bytes at a time, for a ring."""
        _, u, dt, _, B, C, _, z, _ = self.inputs
        if u.is_cuda and not (_ptx(u) and torch.cuda.get_device_properties(u.device).major >= 8):
            return False
        return _pieces(u, dt, z) and _pieces(B, C)

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

    def scan(
        self,
        plan: Plan,
        start: Tensor | None,
        every: int = 0,
        share: int = 1,
        **results: Tensor | None,
    ) -> None:
        """Runs `_scan_kernel` for the results that it is given room for, from the inputs that they take."""
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
            inputs, self.fixed_strides, start, *places, length, channels, plan.length, chunks, share,
            LOG=(A.shape[1] - 1).bit_length(), BD=plan.BD, EVERY=every, POLYNOMIALS=plan.polynomials,
            AHEAD=plan.ahead, **self.settings(plan),
        )  # fmt: skip

    def pull(self, plan: Plan, total: Tensor, pull: Tensor) -> None:
        """Runs `_pull_kernel`."""
        dy, u, dt, A, _, C, _, z, dt_bias = self.inputs
        batch, length, channels = u.shape
        spans = triton.cdiv(length, plan.length)
        _pull_kernel[(batch * spans * triton.cdiv(channels, plan.BD),)](
            (dy, None, dt, A, None, C, None, z, dt_bias), self.fixed_strides, total, pull, length, channels,
            plan.length, spans, LOG=(A.shape[1] - 1).bit_length(), BD=plan.BD, POLYNOMIALS=plan.polynomials,
            AHEAD=plan.ahead, **self.settings(plan),
        )  # fmt: skip

    def scan_whole(
        self, plan: Plan, start: Tensor | None, share: int, y: Tensor, end: Tensor | None
    ) -> None:
        """Runs `_lanes_kernel`."""
        batch, length, channels = self.inputs[1].shape
        _lanes_kernel[(batch * triton.cdiv(channels * plan.parts, plan.BD),)](
            self.inputs, self.fixed_strides, start, y, end, length, channels, share,
            LOG=plan.parts.bit_length() - 1, BD=plan.BD, POLYNOMIALS=plan.polynomials, **self.settings(plan),
        )  # fmt: skip

    def scan_ring(
        self,
        plan: Plan,
        start: Tensor | None,
        share: int,
        y: Tensor,
        end: Tensor | None,
        every: int,
        starts: Tensor | None,
    ) -> None:
        """Runs `_ring_kernel`."""
        batch, length, channels = self.inputs[1].shape
        settings = self.settings(plan)
        del settings["WORDS"], settings["EVEN"]  # as all that a ring takes is
        _ring_kernel[(batch * channels * plan.parts // plan.BD,)](
            self.inputs, self.fixed_strides, start, y, end, starts, length, channels, share,
            LOG=plan.parts.bit_length() - 1, BD=plan.BD, EVERY=every, STAGES=plan.ring, **settings,
        )  # fmt: skip


def _call(dy, u, dt, A, B, C, D, z, dt_bias, softplus) -> _Call:  # noqa: ANN001
    # Rows may be strided: u and z are often halves of one tensor, dt, B and C parts of another.
    rows = [t if t is None or t.stride(2) == 1 else t.contiguous() for t in (dy, u, dt, B, C, z)]
    strides = tuple((0, 0) if t is None else (t.stride(0), t.stride(1)) for t in rows)
    dy, u, dt, B, C, z = rows
    A, D, dt_bias = (None if t is None else t.contiguous() for t in (A, D, dt_bias))
    return _Call((dy, u, dt, A, B, C, D, z, dt_bias), strides, softplus, _words(B, C))


def _chain(term: Tensor, total: Tensor, A: Tensor, initial: Tensor | None, reverse: bool) -> None:
    """Turns the term of every chunk, in place, into what enters the chunk, as `_combine_kernel` does."""
    batch, chunks, channels, states = term.shape
    _combine_kernel[(batch * triton.cdiv(A.numel(), 64),)](
        term, total, A, initial, channels, chunks,
        N=states, BLOCK=64, AHEAD=min(32, triton.next_power_of_2(chunks)), REVERSE=reverse, num_warps=1,
    )  # fmt: skip


def _enter_chunks(
    call: _Call, length: int, h0: Tensor | None, dh: Tensor | None, few: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Returns h before every chunk and, if dh is given, l after it: (B, chunks, D, N) in float32."""
    u, A = call.inputs[1], call.inputs[3]
    batch, T, channels = u.shape
    chunks = triton.cdiv(T, length)
    total = torch.empty((batch, chunks, channels), dtype=torch.float32, device=u.device)
    local = torch.empty((batch, chunks, *A.shape), dtype=torch.float32, device=u.device)
    pull = None if dh is None else torch.empty_like(local)
    plan = plan_summary(length, A.shape[1], dh is not None, few, wide=u.element_size() > 2)
    call.scan(plan, None, total=total, local=local, pull=pull)
    _chain(local, total, A, h0, reverse=False)
    if pull is not None:
        _chain(pull, total, A, dh, reverse=True)
    return local, pull


def _leave_spans(call: _Call, length: int, dh: Tensor | None) -> Tensor:
    """Returns l after every span of so many steps: (B, spans, D, N) in float32."""
    u, A = call.inputs[1], call.inputs[3]
    batch, T, channels = u.shape
    spans = triton.cdiv(T, length)
    total = torch.empty((batch, spans, channels), dtype=torch.float32, device=u.device)
    pull = torch.empty((batch, spans, *A.shape), dtype=torch.float32, device=u.device)
    call.pull(plan_pull(length, A.shape[1], wide=u.element_size() > 2), total, pull)
    _chain(pull, total, A, dh, reverse=True)
    return pull


def forward(
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
    last: bool = True,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns y (B, T, D) in the dtype of u and the last state (B, D, N) in float32, if asked for.

    kept is room for the states that `backward` can start from, of a shape that `kept_shape` names.
    """
    batch, length, channels = u.shape
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    end = torch.empty((batch if last else 0, *A.shape), dtype=torch.float32, device=u.device)
    share = 1 if h0 is None or not batch else batch // len(h0)
    if u.numel() == 0:
        return y, end.zero_() if h0 is None or not last else end.copy_(h0)
    call = _call(None, u, dt, A, B, C, D, z, dt_bias, softplus)
    sizes = (batch, length, channels, A.shape[1], _processors(u.device), u.element_size() > 2)
    plan = plan_forward(*sizes)
    if plan.ring and not call.copies:
        plan = plan_forward(*sizes, copies=False, lanes=kept is None)
    chunks = triton.cdiv(length, plan.length)
    start = None if h0 is None else h0.contiguous()
    if chunks > 1:
        if start is not None and share > 1:
            start = start.repeat_interleave(share, 0)
        share = 1
        start, _ = _enter_chunks(call, plan.length, start, None, few=plan.length <= 32)
    every = 0 if kept is None else plan_backward(*sizes[:5]).length
    if plan.ring:
        call.scan_ring(plan, start, share, y, end if last else None, every, kept)
    elif plan.parts > 1:
        call.scan_whole(plan, start, share, y, end if last else None)
    else:
        # Also in chunks, where strides do not allow the ring that sizes do.
        call.scan(plan, start, every, share, y=y, end=end if last else None, starts=kept)
    return y, end


def decays(logs: list[Tensor]) -> Tensor:
    """Returns -exp of tensors of one shape, one after the other, (len(logs), ...) in float32."""
    out = torch.empty((len(logs), *logs[0].shape), dtype=torch.float32, device=logs[0].device)
    size = logs[0].numel()
    inputs = tuple(log.contiguous() for log in logs)
    _decays_kernel[(triton.cdiv(size, 256),)](inputs, out, size, BLOCK=256, num_warps=4)
    return out


def backward(
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
    kept: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Returns the gradients of u, dt, A, B, C, D, z, dt_bias, h0; empty for an argument not given.

    No dh stands for zeros. kept is what `forward` kept, if it did.
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
    call = _call(dy, u, dt, A, B, C, D, z, dt_bias, softplus)
    plan = plan_backward(batch, length, channels, states, _processors(u.device))
    chunks = triton.cdiv(length, plan.length)
    blocks = triton.cdiv(channels * plan.parts, plan.BD)
    most = max(1, plan.programs // blocks)
    each = 1 if plan.split else chunks
    start, adjoint = (None if t is None else t.contiguous() for t in (h0, dh))
    if chunks > 1 and kept is not None:
        start = kept
        if plan.split:
            each = plan_span(batch, chunks, most)
            adjoint = _leave_spans(call, each * plan.length, adjoint)
    elif chunks > 1 and plan.split:
        if adjoint is None:
            adjoint = torch.zeros((batch, *A.shape), dtype=torch.float32, device=u.device)
        start, adjoint = _enter_chunks(call, plan.length, start, adjoint)
    elif chunks > 1:
        starts = torch.empty(
            (batch, chunks, states, channels), dtype=torch.float32, device=u.device
        )
        call.scan(plan_starts(length, states, B.dtype), start, plan.length, starts=starts)
        start = starts
    spans = triton.cdiv(chunks, each)
    turned = chunks > 1 and (kept is not None or not plan.split)
    settings = call.settings(plan)
    settings["EVEN"] &= length % (2 * plan.K) == 0 and plan.length % (2 * plan.K) == 0
    groups = min(batch * spans, most)
    room = 2 * triton.cdiv(plan.length, 2 * plan.K) * settings["N"] * plan.BD
    # Without PTX a scratch takes the place of shared memory.
    shared = settings["PTX"] and settings["N"] % 4 == 0 and 4 * room <= SHARED_BYTES
    fold = plan.parts == 2 and states == 16
    # Exchanges in PTX take element i to be in lane i: certain only where no tensor has more than one axis.
    settings["PTX"] &= fold
    some = 16 // plan.parts  # states of a lane that one sum over lanes takes
    rounds = triton.cdiv(settings["N"], some)
    scratch, dBC, partial = (
        torch.empty(shape, dtype=torch.float32, device=u.device)
        for shape in (
            (blocks * groups, 0 if shared else room),
            (blocks, batch, length, rounds, 2, some, plan.parts),
            (groups, (states + 2) * channels),
        )
    )
    _scan_backward_kernel[(blocks * groups,)](
        call.inputs, call.fixed_strides, start, adjoint, scratch,
        grads[0], grads[1], None if z is None else grads[6], None if h0 is None else grads[8], dBC, partial,
        length, channels, plan.length, chunks, batch * spans, groups, spans, each,
        PARTS=plan.parts, FOLD=fold, TURNED=turned, SHARED=shared, **settings,
    )  # fmt: skip
    sums = dBC.sum(0)
    if fold:  # lanes by their bits: bits 2, 0, 1 of the state, B or C, bit 3 of the state
        sums = sums.view(batch, length, 2, 2, 2, 2, 2).permute(5, 0, 1, 6, 2, 4, 3).flatten(3)
    else:
        sums = sums.permute(3, 0, 1, 5, 2, 4).flatten(4)[..., : settings["N"]].flatten(3)
    dB, dC = sums.unbind(0)
    dA, dD, ddt_bias = partial.sum(0).split((states * channels, channels, channels))
    for index, grad in ((2, dA.view(channels, states)), (3, dB), (4, dC), (5, dD), (7, ddt_bias)):
        if given[index] is not None:
            grads[index].copy_(grad)
    return tuple(grads)
