"""The Mamba block (Gu and Dao, 2023): a gated selective state space model in a residual branch.

    (u, z) = in_proj(x)         u = silu(conv1d(u))         (dt, B, C) = x_proj(u)
    h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t                dt = softplus(dt_proj(dt))
    y_t = (C_t h_t + D u_t) silu(z_t)                       A = -exp(A_log)
    out = out_proj(y)

Parameters have the names and the initialisation of the published code, so its weights load. The
state keeps `conv`, the last d_conv - 1 inputs of the convolution (B, d_conv - 1, inner), and `ssm`,
h in float32 (B, inner, N).
"""

import math

import torch
from torch import Tensor, nn

from vssm.config import ModelConfig
from vssm.nn.stack import Linear, RMSNorm, StepSizes, apply_in_halves
from vssm.nn.state import State
from vssm.ops import causal_conv_silu, selective_scan

_DT_RANGE = (1e-3, 1e-1)  # range of the initial step sizes, log-uniform
_DT_FLOOR = 1e-4


class MambaMixer(nn.Module):
    """Creates the selective state space layer, without norm and residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner, states, rank = config.width, config.inner, config.state_size, config.dt_rank
        self.rank: int = rank
        self.states: int = states
        self.in_proj: Linear = Linear(width, 2 * inner, bias=False)
        self.conv1d: nn.Conv1d = nn.Conv1d(
            inner, inner, config.conv, groups=inner, padding=config.conv - 1
        )
        self.x_proj: Linear = Linear(inner, rank + 2 * states, bias=False)
        self.dt_proj: StepSizes = StepSizes(rank, inner)
        self.A_log: nn.Parameter = nn.Parameter(
            torch.arange(1.0, states + 1).log().repeat(inner, 1)
        )
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj: Linear = Linear(inner, width, bias=False)
        with torch.no_grad():
            self.dt_proj.weight.uniform_(-(rank**-0.5), rank**-0.5)
            low, high = map(math.log, _DT_RANGE)
            dt = torch.empty(inner).uniform_(low, high).exp().clamp_min(_DT_FLOOR)
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus
            # Each residual branch adds its variance: keep the sum independent of the depth.
            self.out_proj.weight.div_(math.sqrt(config.layers))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Maps x (B, T, width) to (B, T, width) and returns the state after the last step."""
        conv, h = (None, None) if state is None else (state["conv"], state["ssm"])
        taps, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        assert bias is not None
        u, z = apply_in_halves(self.in_proj, x)
        u, conv = causal_conv_silu(u, taps, bias, conv)
        dt, B, C = self.x_proj(u).split([self.rank, self.states, self.states], -1)
        A = -torch.exp(self.A_log.float())
        dt, dt_bias = self.dt_proj(dt), self.dt_proj.bias
        y, h = selective_scan(u, dt, A, B, C, self.D, z, dt_bias, softplus=True, h0=h)
        position = x.shape[1] + (0 if state is None else state.position)
        return self.out_proj(y), State({"conv": conv, "ssm": h}, position)


class MambaBlock(nn.Module):
    """Creates a residual pre-norm block around a `MambaMixer`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm: RMSNorm = RMSNorm(config.width, eps=1e-5)
        self.mixer: MambaMixer = MambaMixer(config)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Maps x (B, T, width) to (B, T, width) and returns the state after the last step."""
        y, after = self.mixer(self.norm(x), state)
        return x + y, after
