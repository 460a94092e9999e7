"""Blocks for a frozen model on a GPU: fewer kernels, and weights in the layout that they read.

They compute what the plain modules of `vssm.nn` compute, to rounding, and have the same signatures.
Because the weights never change, A = -exp(A_log) is computed once, and every matrix keeps the
halves that products of many rows read (`vssm.ops.linear`). The kernel that ends a product also adds
the residual.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.models import Model, Variational
from vssm.nn import AttentionBlock, GRUBlock, MambaBlock, MambaMixer, State, join_weights
from vssm.nn.stack import Linear, RMSNorm, StepSizes
from vssm.ops import causal_conv_silu, selective_scan
from vssm.ops.linear import PackedWeight, linear


def fuse(model: Model) -> None:
    """Replaces the layers and blocks of a frozen model by fused ones, in place.

    Modules of other classes, such as the adapters of LoRA, stay as they are, and so do the blocks
    that own them. A model with hooks stays as it is, because fused blocks would not call them.

    Arguments:
        model: The model. Its weights must not change any more.
    """
    if isinstance(model, Variational):
        model.encoder = nn.Identity()  # generation does not read it  # type: ignore[assignment]
    join_weights(model)
    if not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules()):
        _replace(model)


def _replace(parent: nn.Module) -> None:
    fused = {
        Linear: PackedLinear,
        MambaBlock: FusedMamba,
        AttentionBlock: FusedAttention,
        GRUBlock: FusedGRU,
    }
    for name, child in list(parent.named_children()):
        _replace(child)
        if type(child) in fused and _has_own_parts(child):
            setattr(parent, name, fused[type(child)](child))


def _has_own_parts(block: nn.Module) -> bool:
    """Says whether nobody has replaced a part of a block; its linear layers are packed already."""
    _, *parts = block.modules()
    norms = RMSNorm, nn.RMSNorm, nn.LayerNorm
    own = PackedLinear, StepSizes, MambaMixer, nn.Conv1d, nn.GRU, *norms
    return all(type(part) in own for part in parts)


class PackedLinear(nn.Module):
    """Creates a frozen linear layer from a plain one."""

    weight: Tensor
    bias: nn.Parameter
    in_features: int
    out_features: int

    def __init__(self, layer: Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.packed: PackedWeight = PackedWeight(layer.weight)

    def forward(
        self, x: Tensor, add: Tensor | None = None, norm: nn.RMSNorm | None = None
    ) -> Tensor:
        """Maps x (..., K), after the norm, to (..., N) and adds `add` (..., N)."""
        return linear(x, self.packed, self.bias, add, norm)


class FusedMamba(MambaBlock):
    """Creates a frozen Mamba block from a plain one."""

    taps: Tensor
    bias: Tensor

    def __init__(self, block: MambaBlock) -> None:
        nn.Module.__init__(self)
        mixer = block.mixer
        self.norm, self.mixer = block.norm, mixer
        assert mixer.conv1d.bias is not None
        self.taps, self.bias = mixer.conv1d.weight.squeeze(1).contiguous(), mixer.conv1d.bias
        self.A = -torch.exp(mixer.A_log.detach().float())
        self.dt_weight: PackedWeight = PackedWeight(mixer.dt_proj.weight)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Maps x (B, T, width) to (B, T, width) and returns the state after the last step."""
        mixer = self.mixer
        conv, h = (None, None) if state is None else (state["conv"], state["ssm"])
        u, z = mixer.in_proj(x, norm=self.norm).chunk(2, -1)
        u, conv = causal_conv_silu(u, self.taps, self.bias, conv)
        dt, B, C = mixer.x_proj(u).split([mixer.rank, mixer.states, mixer.states], -1)
        dt = linear(dt, self.dt_weight)
        inputs = u, dt, self.A, B, C, mixer.D, z, mixer.dt_proj.bias
        y, h = selective_scan(*inputs, softplus=True, h0=h)
        position = x.shape[1] + (0 if state is None else state.position)
        return mixer.out_proj(y, add=x), State({"conv": conv, "ssm": h}, position)


class FusedAttention(AttentionBlock):
    """Creates a frozen attention block from a plain one."""

    def __init__(self, block: AttentionBlock) -> None:
        nn.Module.__init__(self)
        self.heads = block.heads
        for name, layer in block.named_children():
            setattr(self, name, layer)

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds the output projection of attention, y, and the feed-forward network to x."""
        x = self.c_proj(y, add=x)
        hidden = F.gelu(self.mlp_c_fc(self.ln_2(x)), approximate="tanh")
        return self.mlp_c_proj(hidden, add=x)


class FusedGRU(GRUBlock):
    """Creates a frozen GRU block from a plain one: a step has two products and one kernel."""

    def __init__(self, block: GRUBlock) -> None:
        nn.Module.__init__(self)
        self.norm, self.gru = block.norm, block.gru
        weights = dict(block.gru.named_parameters())
        self.input_weight: PackedWeight = PackedWeight(weights["weight_ih_l0"])
        self.hidden_weight: PackedWeight = PackedWeight(weights["weight_hh_l0"])

    def cell(self, x: Tensor, h: Tensor) -> Tensor:
        """Returns the hidden state after one step."""
        if not x.is_cuda:
            return super().cell(x, h)
        gates = linear(x[:, 0], self.input_weight, norm=self.norm)
        recurrent = linear(h, self.hidden_weight)
        biases = self.gru.bias_ih_l0, self.gru.bias_hh_l0
        return torch.ops.aten._thnn_fused_gru_cell(gates, recurrent, h, *biases)[0]
