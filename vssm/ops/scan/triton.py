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

Packed sequences share one row. `_scan_kernel` and `_scan_backward_kernel` find out where each of
them starts and ends (`_sequence`) and run straight through it; the forward always keeps states.
"""

from collections.abc import Callable
from functools import lru_cache, partial

import torch
import triton.language as tl
from torch import Tensor

from vssm.ops.launch_triton import ceil_div, launch, next_power, processors
from vssm.ops.scan.triton_backward import SHARED_BYTES, _scan_backward_kernel

from vssm.ops.scan.triton_forward import (  # isort: skip
    _combine_kernel, _lanes_kernel, _pull_kernel, _scan_kernel,
)  # fmt: skip
from vssm.ops.scan.triton_plans import (  # isort: skip
    Plan, plan_backward, plan_forward, plan_packed, plan_pull, plan_span, plan_summary,
)  # fmt: skip
from vssm.ops.scan.triton_ring import _ring_kernel

_PACKED = 512  # steps of packed sequences as plans see them: theirs are not known before


def kept_shape(
    batch: int,
    length: int,
    channels: int,
    states: int,
    dtype: torch.dtype,
    device: torch.device,
    sequences: int = 0,
) -> tuple[int, ...]:
    """Returns the shape of the states that `forward` keeps for `backward`, if a graph is recorded.

    It is (B, chunks of the backward, N, D), or (0,) if there is only one chunk or if the forward
    runs in chunks or with lanes. Strides do not count, because a trace does not know them. The
    chunks of packed sequences, so many of them, have a row of their own each.
    """
    sizes = (batch, length, channels, states, processors(device))
    if sequences:
        chunk = _plan(plan_backward, sequences, _PACKED, *sizes[2:]).length
        return (1, length // chunk + sequences, states, channels)
    chunk = _plan(plan_backward, *sizes).length
    if length <= chunk:
        return (0,)
    plan = _plan(plan_forward, *sizes, dtype.itemsize > 2)
    if plan.length < length or (plan.parts > 1 and not plan.ring):
        return (0,)
    return (batch, ceil_div(length, chunk), states, channels)


def _aligned(layout: tuple, size: int) -> bool:
    """Returns whether all rows of a tensor start at multiples of a size in bytes."""
    (row, step, _), dtype, offset = layout
    return all(start % size == 0 for start in (offset, row * dtype.itemsize, step * dtype.itemsize))


class Call:
    """Launches kernels for tensors of some sizes, strides, dtypes and alignments.

    `inputs` are always (dy, u, dt, A, B, C, D, z, dt_bias).
    """

    def __init__(
        self, size: torch.Size, states: int, softplus: bool, device: torch.device, layouts: tuple
    ) -> None:
        dy, u, dt, A, B, C, D, z, dt_bias = layouts
        self.size, self.states, self.softplus = size, states, softplus
        rows, wholes = (dy, u, dt, B, C, z), ((A, (states, 1)), (D, (1,)), (dt_bias, (1,)))
        self.dense = all(t is None or t[0][2] == 1 for t in rows)
        self.dense &= all(t is None or t[0] == strides for t, strides in wholes)
        # Strides of batch and time. Those of time are compiled in: registers would cost 6 % more
        # instructions.
        strides = [(0, 0) if t is None else t[0][:2] for t in rows]
        self.strides = tuple(
            [(row, tl.constexpr(step if size[1] > 1 else 0)) for row, step in strides]
        )
        self.words = all(_aligned(t, 8) for t in (B, C))
        self.itemsize = min(B[1].itemsize, C[1].itemsize)
        # Triton's interpreter and GPUs of other makers have no PTX.
        self.ptx = device.type == "cuda" and torch.version.cuda is not None
        # Whether inputs can be copied to shared memory 16 bytes at a time, for a ring.
        self.copies = device.type != "cuda" or (
            self.ptx and torch.cuda.get_device_properties(device).major >= 8
        )
        for layout, *others in ([t for t in (u, dt, z) if t is not None], [B, C]):
            same = all(t[1] == layout[1] and _aligned(t, 16) for t in (layout, *others))
            self.copies &= same and layout[1] in (torch.float32, torch.bfloat16)
        self._settings: dict[tuple, dict] = {}

    def settings(self, plan: Plan, packed: bool = False, back: bool = False) -> dict:
        """Returns what every kernel compiles in, and more for the one that walks back."""
        found = self._settings.get((plan, packed, back))
        if found is None:
            found = self._settings[plan, packed, back] = self._find_settings(plan, packed, back)
        return found

    def _find_settings(self, plan: Plan, packed: bool, back: bool) -> dict:
        _, length, channels = self.size
        N, block = self.states // plan.parts, 2 * plan.K if back else plan.K
        whole = channels * plan.parts % plan.BD == length % block == plan.length % block == 0
        settings = {
            "channels": channels,
            "N": N,
            "K": plan.K,
            "SOFTPLUS": self.softplus,
            "WORDS": self.words and N * self.itemsize % 8 == 0,
            "EVEN": whole and not packed,
            "PTX": self.ptx,
            "num_warps": plan.warps,
        } | ({} if plan.registers is None else {"maxnreg": plan.registers})
        if back:
            fold = plan.parts == 2 and self.states == 16
            # Without PTX, or if the states do not fit, a scratch takes the place of shared memory.
            shared = self.ptx and N % 4 == 0 and 4 * scratch_size(plan, N) <= SHARED_BYTES
            # Exchanges in PTX need element i in lane i, which is certain only if all tensors have
            # one axis.
            settings["PTX"] &= fold
            settings |= {"PARTS": plan.parts, "FOLD": fold, "SHARED": shared}
        return settings

    def scan(
        self,
        inputs: tuple,
        plan: Plan,
        start: Tensor | None,
        every: int = 1,
        hold: bool = False,
        packed: Tensor | None = None,
        **results: Tensor | None,
    ) -> None:
        """Runs `_scan_kernel` for the results that it is given room for."""
        dy, u, dt, A, B, C, D, z, dt_bias = inputs
        batch, length, channels = self.size
        if "y" not in results:
            if results.get("pull") is None:
                dy = C = z = None
            inputs = (dy, u, dt, A, B, C, None, z, dt_bias)
        chunks = ceil_div(length, plan.length)
        sequences = batch * chunks if packed is None else len(packed) - 1
        places = [results.get(name) for name in ("y", "end", "total", "local", "pull", "starts")]
        launch(
            _scan_kernel, (sequences * ceil_div(channels, plan.BD),),
            inputs, self.strides, packed, start, *places, length, plan.length, chunks,
            key=(self, plan, every, hold), LOG=(self.states - 1).bit_length(), BD=plan.BD,
            EVERY=every, AHEAD=plan.ahead, HOLD=hold, **self.settings(plan, packed is not None),
        )  # fmt: skip

    def pull(self, inputs: tuple, plan: Plan, total: Tensor, pull: Tensor) -> None:
        """Runs `_pull_kernel`."""
        dy, _, dt, A, _, C, _, z, dt_bias = inputs
        batch, length, channels = self.size
        spans = ceil_div(length, plan.length)
        launch(
            _pull_kernel, (batch * spans * ceil_div(channels, plan.BD),),
            (dy, None, dt, A, None, C, None, z, dt_bias), self.strides, total, pull, length,
            plan.length, spans, key=(self, plan), LOG=(self.states - 1).bit_length(), BD=plan.BD,
            AHEAD=plan.ahead, **self.settings(plan),
        )  # fmt: skip

    def scan_lanes(
        self, inputs: tuple, plan: Plan, start: Tensor | None, y: Tensor, end: Tensor
    ) -> None:
        """Runs `_lanes_kernel`."""
        batch, length, channels = self.size
        launch(
            _lanes_kernel, (batch * ceil_div(channels * plan.parts, plan.BD),),
            inputs, self.strides, start, y, end, length, key=(self, plan),
            LOG=plan.parts.bit_length() - 1, BD=plan.BD, **self.settings(plan),
        )  # fmt: skip

    def scan_ring(
        self,
        inputs: tuple,
        plan: Plan,
        start: Tensor | None,
        y: Tensor,
        end: Tensor,
        every: int,
        starts: Tensor | None,
    ) -> None:
        """Runs `_ring_kernel`."""
        batch, length, channels = self.size
        settings = {**self.settings(plan)}
        del settings["WORDS"], settings["EVEN"]  # a ring always has whole words and blocks
        launch(
            _ring_kernel, (batch * channels * plan.parts // plan.BD,),
            inputs, self.strides, start, y, end, starts, length, key=(self, plan, every),
            LOG=plan.parts.bit_length() - 1, BD=plan.BD, EVERY=every, STAGES=plan.ring, **settings,
        )  # fmt: skip


def scratch_size(plan: Plan, N: int) -> int:
    """Returns how many numbers a program that walks back keeps of N states a lane."""
    return 2 * ceil_div(plan.length, 2 * plan.K) * N * plan.BD


_call = lru_cache(4096)(Call)


@lru_cache(4096)
def _known_plan(planned: Callable[..., Plan], sizes: tuple, options: tuple) -> Plan:
    return planned(*sizes, **dict(options))


def _plan(planned: Callable[..., Plan], *sizes: int, **options: bool) -> Plan:
    """Returns a plan, found once for all calls of the same sizes; a trace may not know them."""
    if type(sizes[0]) is type(sizes[1]) is int:
        return _known_plan(planned, sizes, tuple(options.items()))
    return planned(*sizes, **options)


def _prepare(inputs: tuple, softplus: bool) -> tuple[tuple, Call]:
    """Returns the inputs as the kernels take them, and the call; rows may be strided."""
    u, A = inputs[1], inputs[3]
    for attempt in range(2):
        layouts = tuple(
            [None if t is None else (t.stride(), t.dtype, t.data_ptr() % 16) for t in inputs]
        )
        call = _call(u.shape, A.shape[1], softplus, u.device, layouts)
        if call.dense or attempt:  # a size of 1 may keep a stride that looks strange
            break
        inputs = tuple([None if t is None else _without_gaps(t) for t in inputs])
    return inputs, call


def _without_gaps(tensor: Tensor) -> Tensor:
    """Returns a copy unless the columns of rows (B, T, D), or all of another tensor, are dense."""
    return tensor if tensor.ndim == 3 and tensor.stride(2) == 1 else tensor.contiguous()


def _floats(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _chain(term: Tensor, total: Tensor, A: Tensor, initial: Tensor | None, reverse: bool) -> None:
    """Turns the term of every chunk, in place, into the value that enters the chunk."""
    batch, chunks, channels, states = term.shape
    ahead = min(32, next_power(chunks))
    launch(
        _combine_kernel, (batch * ceil_div(A.numel(), 64),),
        term, total, A, initial, channels, chunks,
        N=states, BLOCK=64, AHEAD=ahead, REVERSE=reverse, num_warps=1,
    )  # fmt: skip


def _enter_chunks(
    call: Call,
    inputs: tuple,
    length: int,
    h0: Tensor | None,
    dh: Tensor | None,
    few: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns h before every chunk and, given dh, l after it: (B, chunks, D, N) in float32."""
    u, A = inputs[1], inputs[3]
    batch, T, channels = u.shape
    chunks = ceil_div(T, length)
    total, local = _floats(u, batch, chunks, channels), _floats(u, batch, chunks, *A.shape)
    pull = None if dh is None else torch.empty_like(local)
    plan = plan_summary(length, A.shape[1], dh is not None, few, wide=u.element_size() > 2)
    call.scan(inputs, plan, None, total=total, local=local, pull=pull)
    _chain(local, total, A, h0, reverse=False)
    if pull is not None:
        _chain(pull, total, A, dh, reverse=True)
    return local, pull


def _leave_spans(call: Call, inputs: tuple, length: int, dh: Tensor | None) -> Tensor:
    """Returns l after every span of this many steps: (B, spans, D, N) in float32."""
    u, A = inputs[1], inputs[3]
    batch, T, channels = u.shape
    spans = ceil_div(T, length)
    total, pull = _floats(u, batch, spans, channels), _floats(u, batch, spans, *A.shape)
    call.pull(inputs, plan_pull(length, A.shape[1], wide=u.element_size() > 2), total, pull)
    _chain(pull, total, A, dh, reverse=True)
    return pull


def scan_forward(
    inputs: tuple, softplus: bool, kept: Tensor | None = None, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns y (B, T, D) in the dtype of u, and the last state (B, D, N) in float32.

    kept is room for the states that `backward` can start from, in the shape of `kept_shape`. starts
    says where packed sequences start, and where the last one ends.
    """
    u, dt, A, B, C, D, z, dt_bias, h0 = inputs
    batch, length, channels = u.shape
    rows, states = batch if starts is None else len(starts) - 1, A.shape[1]
    y, end = torch.empty(u.shape, dtype=u.dtype, device=u.device), _floats(u, rows, *A.shape)
    if u.numel() == 0:
        return y, end.zero_() if h0 is None else end.copy_(h0)
    inputs, call = _prepare((None, u, dt, A, B, C, D, z, dt_bias), softplus)
    start, count = None if h0 is None else h0.contiguous(), processors(u.device)
    if starts is not None:
        plan, packed = plan_packed(rows, length, channels, states, count), starts.to(u.device)
        every = _plan(plan_backward, rows, _PACKED, channels, states, count).length
        call.scan(inputs, plan, start, every, packed=packed, y=y, end=end, starts=kept)
        return y, end
    sizes = (batch, length, channels, states, count, u.dtype.itemsize > 2)
    plan = _plan(plan_forward, *sizes)
    if plan.ring and not call.copies:
        plan = _plan(plan_forward, *sizes, copies=False, lanes=kept is None)
    if plan.length < length:
        start, _ = _enter_chunks(call, inputs, plan.length, start, None, few=plan.length <= 32)
    every = 1 if kept is None else _plan(plan_backward, *sizes[:5]).length
    if plan.ring:
        call.scan_ring(inputs, plan, start, y, end, every, kept)
    elif plan.parts > 1:
        call.scan_lanes(inputs, plan, start, y, end)
    else:
        call.scan(inputs, plan, start, every, y=y, end=end, starts=kept)
    return y, end


def scan_ahead(inputs: tuple) -> Tensor:
    """Returns y of `vssm.ops.scan.scan_ahead`. Time is not cut into chunks."""
    u, dt, A, B, C, D, z, dt_bias, h0 = inputs
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    if u.numel():
        plan = Plan(2 * ceil_div(u.shape[1], 2), 32, 2, None, True)
        inputs, call = _prepare((None, u, dt, A, B, C, D, z, dt_bias), True)
        call.scan(inputs, plan, None if h0 is None else h0.contiguous(), hold=True, y=y)
    return y


def scan_backward(
    dy: Tensor,
    dh: Tensor | None,
    inputs: tuple,
    softplus: bool,
    kept: Tensor | None = None,
    starts: Tensor | None = None,
) -> list[Tensor | None]:
    """Returns the gradients of the inputs of `scan_forward`.

    Without dh, the gradient of the last state is zero. kept is what `forward` kept, if anything;
    with packed sequences it always is something.
    """
    u, dt, A, B, C, D, z, dt_bias, h0 = inputs
    batch, length, channels = u.shape
    states, floats = A.shape[1], partial(_floats, u)
    if u.numel() == 0:
        return [None if t is None else torch.zeros_like(t) for t in inputs[:8]] + [dh]
    inputs, call = _prepare((dy, u, dt, A, B, C, D, z, dt_bias), softplus)
    start, adjoint = (None if t is None else t.contiguous() for t in (h0, dh))
    packed, sequences = None, batch
    if starts is not None:
        packed, sequences = starts.to(u.device), len(starts) - 1
    steps = length if packed is None else _PACKED
    plan = _plan(plan_backward, sequences, steps, channels, states, processors(u.device))
    chunks = ceil_div(length, plan.length) if packed is None else 1
    blocks = ceil_div(channels * plan.parts, plan.BD)
    most = max(1, plan.programs // blocks)
    turned, each = packed is not None or (chunks > 1 and kept is not None), 1
    if turned:
        start, each = kept, chunks  # chunks of a span
        if plan.split and packed is None:
            each = plan_span(batch, chunks, most)
            adjoint = _leave_spans(call, inputs, each * plan.length, adjoint)
    elif chunks > 1:
        adjoint = floats(batch, *A.shape).zero_() if adjoint is None else adjoint
        start, adjoint = _enter_chunks(call, inputs, plan.length, start, adjoint)
    spans = ceil_div(chunks, each)
    groups = min(sequences * spans, most)
    settings = call.settings(plan, packed is not None, back=True)
    N, some = settings["N"], 16 // plan.parts  # states of a lane, and of one sum over lanes
    du, ddt, dz, dh0 = (
        None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)
        for t in (u, dt, z, h0)
    )
    scratch = None if settings["SHARED"] else floats(blocks * groups, scratch_size(plan, N))
    dBC = floats(blocks, batch, length, ceil_div(N, some), 2, some, plan.parts)
    dA = floats(groups, channels, states)
    dD, dbias = floats(groups, channels), floats(groups, channels)
    launch(
        _scan_backward_kernel, (blocks * groups,),
        inputs, call.strides, packed, start, adjoint, scratch, du, ddt, dz, dh0, dBC, dA, dD, dbias,
        length, plan.length, chunks, sequences * spans, groups, spans, each,
        key=(call, plan, turned), TURNED=turned, **settings,
    )  # fmt: skip
    sums = dBC.sum(0)
    if settings["FOLD"]:
        # The bits of a lane are bits 2, 0, 1 of the state, B or C, and bit 3 of the state.
        sums = sums.view(batch, length, 2, 2, 2, 2, 2).permute(5, 0, 1, 6, 2, 4, 3)
    else:
        sums = sums.permute(3, 0, 1, 5, 2, 4).flatten(4)[..., :N]
    dB, dC = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device).view(total.shape).copy_(total)
        for t, total in zip((B, C), sums, strict=True)
    )
    return [
        *(du, ddt, dA.sum(0).to(A.dtype), dB.view(B.shape), dC.view(C.shape)),
        *(None if D is None else dD.sum(0).to(D.dtype), dz),
        *(None if dt_bias is None else dbias.sum(0).to(dt_bias.dtype), dh0),
    ]
