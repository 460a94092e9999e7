"""The Mamba block (Gu and Dao, 2023): a gated selective state space model in a residual branch.

    (u, z) = in_proj(x)         u = silu(conv1d(u))         (dt, B, C) = x_proj(u)
    h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t                dt = softplus(dt_proj(dt))
    y_t = (C_t h_t + D u_t) silu(z_t)                       A = -exp(A_log)
    out = out_proj(y)

Parameters have the names and the initialisation of the published code, so that its weights load.
The state keeps `conv`, the last d_conv - 1 inputs of the convolution (B, d_conv - 1, inner), and
`ssm`, h in float32 (B, inner, N).
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.config import ModelConfig
from vssm.nn.state import State
from vssm.ops import causal_conv_silu, selective_scan
from vssm.ops.conv import linear_conv_silu
from vssm.ops.dispatch import choose_fused
from vssm.ops.linear import Linear, Ready, applied, linear, linear_ready, plain
from vssm.ops.norm import RMSNorm
from vssm.ops.scan import scan_output

__all__ = ["MambaBlock", "MambaMixer", "decays"]

_DT_RANGE = (1e-3, 1e-1)  # range of the initial step sizes, log-uniform
_DT_FLOOR = 1e-4


class MambaMixer(nn.Module):
    """Creates the selective state space layer, without norm and residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner, states, rank = config.width, config.inner, config.state_size, config.dt_rank
        self.rank, self.states = rank, states
        self.in_proj = Linear(width, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, config.conv, groups=inner, padding=config.conv - 1)
        self.x_proj = Linear(inner, rank + 2 * states, bias=False)
        self.dt_proj = Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = Linear(inner, width, bias=False)
        with torch.no_grad():
            self.dt_proj.weight.uniform_(-(rank**-0.5), rank**-0.5)
            low, high = map(math.log, _DT_RANGE)
            dt = torch.empty(inner).uniform_(low, high).exp().clamp_min(_DT_FLOOR)
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus
            # Each residual branch adds its variance: keep the sum independent of the depth.
            self.out_proj.weight.div_(math.sqrt(config.layers))

    def forward(
        self,
        x: Tensor | Ready,
        state: State | None = None,
        norm: nn.Module | None = None,
        add: Tensor | None = None,
        A: Callable[[], Tensor] | None = None,
        last: bool = True,
        then: tuple[nn.Module, int] | None = None,
    ) -> tuple[Tensor | Ready, State]:
        """Maps x (B, T, width) to (B, T, width) and returns the state after the last step.

        `norm` is applied before, and `add`, (B, T, width), is added: kernels can do both on the way. `A`
        returns -exp(A_log), (inner, N), where that is known. With `last=False` the state that is returned
        holds nothing but its position, and a state of fewer rows, B / S, may be given: each is where S
        neighbouring rows of x start. Where it is known which norm and how many columns the product has that
        is `then` to read the result, that may come ready for it.
        """
        given = x.x if isinstance(x, Ready) else x
        taps = self.conv1d.weight.squeeze(1)
        assert self.conv1d.bias is not None
        before = (None, None) if state is None else (state["conv"], state["ssm"])
        convolution = taps, self.conv1d.bias, before[0]
        # Layers that are not plain are called, here and below: they may do more than multiply.
        if not plain(self.in_proj):
            u, z = applied(self.in_proj, given, norm=norm).chunk(2, -1)
            u, conv = causal_conv_silu(u, *convolution, last=last)
        elif (
            torch.is_grad_enabled() and given.is_cuda
        ):  # two products: no gradient has to be put together
            given = given if norm is None else norm(given)
            u, z = (
                F.linear(given, half) for half in self.in_proj.weight.unflatten(0, (2, -1)).unbind()
            )
            u, conv = causal_conv_silu(u, *convolution, last=last)
        else:
            u, z, conv = linear_conv_silu(x, self.in_proj.weight, *convolution, norm, last=last)
        dt, B, C = self.x_proj(u).split([self.rank, self.states, self.states], -1)
        dt, bias = self.steps(dt)
        decay = -torch.exp(self.A_log.float()) if A is None else A()
        inputs = (u, dt, decay, B, C, self.D, z, bias, True, before[1])
        after = State({}, given.shape[1] + (0 if state is None else state.position))
        if last:
            y, h = selective_scan(*inputs)
            after = State({"conv": conv, "ssm": h}, after.position)
        else:
            y = scan_output(*inputs)
        if then is None or add is None or not plain(self.out_proj):
            return applied(self.out_proj, y, add), after
        return linear_ready(y, self.out_proj.weight, add, *then), after

    def steps(self, dt: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the step sizes before softplus, (B, T, inner), and what is to be added to them first."""
        if plain(self.dt_proj):
            return linear(dt, self.dt_proj.weight), self.dt_proj.bias
        return applied(self.dt_proj, dt), torch.zeros_like(self.D)


class MambaBlock(nn.Module):
    """Creates a residual pre-norm block around a `MambaMixer`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.width, eps=1e-5)
        self.mixer = MambaMixer(config)

    def forward(
        self,
        x: Tensor | Ready,
        state: State | None = None,
        A: Callable[[], Tensor] | None = None,
        last: bool = True,
        then: tuple[nn.Module, int] | None = None,
    ) -> tuple[Tensor | Ready, State]:
        """Maps x (B, T, width) to (B, T, width) and returns the state after the last step.

        `A`, `last`, states of fewer rows and `then` are as for `MambaMixer`.
        """
        return self.mixer(x, state, self.norm, x.x if isinstance(x, Ready) else x, A, last, then)


def decays(blocks: Iterable[nn.Module]) -> list[Tensor]:
    """Returns A = -exp(A_log) of each block, made at once for all, by a kernel on a GPU; without a gradient.

    Nothing is returned where blocks are sharded (FSDP2): weights of theirs are whole inside `forward` only.
    """
    logs = [block.mixer.A_log.detach() for block in blocks if isinstance(block, MambaBlock)]
    if not logs or hasattr(logs[0], "full_tensor"):
        return []
    refusal = "it is unknown to torch.compile" if torch.compiler.is_compiling() else None
    if choose_fused("auto", logs[0].device, logs[0].dtype, refusal):
        from vssm.ops.scan import triton as scan_triton

        return list(scan_triton.decays(logs))
    logs = [log.float() for log in logs]
    # `_foreach_exp` would give 65536 numbers to one block of threads, which is slow.
    return list(torch.stack(logs).exp_().neg_())
