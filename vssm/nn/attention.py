"""The GPT-2 block (Radford et al., 2019): causal self-attention and a feed-forward network.

    x <- x + c_proj(attention(c_attn(ln_1(x))))         x <- x + mlp(ln_2(x))

The state keeps `k` and `v`, (B, heads, steps, size). It grows with the sequence: that is why the
Transformer cannot resume in constant memory. `State.position` says how many steps are filled;
a state made by `reserve` has room for more, which is then written in place.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.config import ModelConfig
from vssm.nn.stack import Linear
from vssm.nn.state import State


class AttentionBlock(nn.Module):
    """Creates a residual pre-norm block of attention and a feed-forward network."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.heads: int = config.heads
        self.ln_1: nn.LayerNorm = nn.LayerNorm(width, eps=1e-5)
        self.c_attn: Linear = Linear(width, 3 * width)
        self.c_proj: Linear = Linear(width, width)
        self.ln_2: nn.LayerNorm = nn.LayerNorm(width, eps=1e-5)
        self.mlp_c_fc: Linear = Linear(width, 4 * width)
        self.mlp_c_proj: Linear = Linear(4 * width, width)
        for linear in (self.c_attn, self.c_proj, self.mlp_c_fc, self.mlp_c_proj):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        for linear in (self.c_proj, self.mlp_c_proj):  # two residual branches a block
            nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Maps x (B, T, width) to (B, T, width) and returns the keys and values seen so far."""
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.c_attn(self.ln_1(x)).chunk(3, -1)
        )
        past = 0 if state is None else state.position
        state = _append(k, v, state)
        k, v = state["k"][:, :, : past + length], state["v"][:, :, : past + length]
        if past == 0 or length == 1:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=past == 0 and length > 1)
        else:
            steps = torch.arange(past + length, device=x.device)
            mask = steps <= past + torch.arange(length, device=x.device)[:, None]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.finish(x, y.transpose(1, 2).reshape(batch, length, width)), state

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds the output projection of attention, y, and the feed-forward network to x."""
        x = x + self.c_proj(y)
        hidden = F.gelu(self.mlp_c_fc(self.ln_2(x)), approximate="tanh")
        return x + self.mlp_c_proj(hidden)


def _append(k: Tensor, v: Tensor, state: State | None) -> State:
    length = k.shape[2]
    if state is None:
        return State({"k": k, "v": v}, length)
    past, end = state.position, state.position + length
    if end <= state["k"].shape[2]:  # room made by `reserve`, which owns its buffers
        state["k"][:, :, past:end] = k
        state["v"][:, :, past:end] = v
        return State({"k": state["k"], "v": state["v"]}, end)
    return State(
        {name: torch.cat([state[name][:, :, :past], t], 2) for name, t in (("k", k), ("v", v))}, end
    )


def reserve(state: State, length: int) -> State:
    """Copies every key-value cache in the tree into buffers with room for `length` more steps.

    A loop can then append in place instead of copying the cache at every step. The buffers belong
    to that loop: it passes its final state through `trim`, so that no two states share room.
    """
    if "k" not in state.children:
        children = {
            n: reserve(c, length) if isinstance(c, State) else c for n, c in state.children.items()
        }
        return State(children, state.position, state.owner)
    children = {}
    for name in ("k", "v"):
        batch, heads, _, size = state[name].shape
        buffer = state[name].new_empty(batch, heads, state.position + length, size)
        buffer[:, :, : state.position] = state[name][:, :, : state.position]
        children[name] = buffer
    return State(children, state.position)


def trim(state: State) -> State:
    """Views every key-value cache in the tree without its spare room."""
    if "k" not in state.children:
        children = {n: trim(c) if isinstance(c, State) else c for n, c in state.children.items()}
        return State(children, state.position, state.owner)
    return State({name: state[name][:, :, : state.position] for name in ("k", "v")}, state.position)
