"""The partial posterior one step ahead of every position at once, for passes of refinement.

    q_omega(z_t | x_{1:t-1}),  t = 1 ... W        the partial posterior with its cut at t - 1

Two streams go through the stack together, interleaved: ∅_1, x_1, ∅_2, x_2, ..., x_{W-1}, ∅_W. An x
sees the x before it and itself; an empty token ∅ sees the x before it and itself, and nothing ever
sees it:

    Mamba        h°_t = exp(dt°_t A) h_{t-1} + dt°_t B°_t u°_t        y°_t = C°_t h°_t + D u°_t
                 h_t  = exp(dt_t A) h_{t-1} + dt_t B_t u_t            y_t  = C_t h_t + D u_t
                 u° is convolved over the last inputs of the x and its own
    attention    a mask says who sees whom

The letters are those of `vssm.nn`, with ° for empty tokens. Steps are counted from 0 in the code:
the even ones are empty. The scan (`scan_ahead`) computes an even step but leaves the state as it
was. It costs as much as a scan of 2 W - 1 steps.

Legend: s (B, 2 W - 1, width), the two streams; u, dt, z, y (B, 2 W - 1, inner); B, C (B, 2 W - 1,
N).
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.distributions import Latents
from vssm.models import Variational
from vssm.nn import AttentionBlock, MambaBlock, MambaMixer, State
from vssm.nn.stack import sinusoids
from vssm.ops import causal_conv_silu
from vssm.ops.scan.ahead import scan_ahead


@torch.no_grad()
def posterior_ahead(model: Variational, x: Tensor, state: State | None = None) -> Latents:
    """Returns q_omega(z_t | what the state has read, x_{1:t-1}) for all steps of x.

    Arguments:
        model: A vssm or tvae.
        x: The sequence, (B, W, D), or (B, W) tokens; nothing depends on its last step.
        state: The state of the partial posterior before x, of B rows.

    Returns:
        Latents of shape (B, W, Z).

    Example:
        >>> from vssm import ModelConfig, build
        >>> sizes = {"width": 8, "layers": 2, "latents": 4, "classes": 5}
        >>> model = build(ModelConfig(kind="vssm", features=3, **sizes))
        >>> x = torch.rand(2, 6, 3)
        >>> ahead, (one, _) = posterior_ahead(model, x), model.partial_posterior(x[:, :4], empty=1)
        >>> torch.allclose(ahead.logits[:, 4], one.logits[:, 4], atol=1e-5)
        True
    """
    stack, (batch, width) = model.partial, x.shape[:2]
    s = torch.stack([stack.blanks(batch, width), stack.embed(x)], 2).flatten(1, 2)[:, :-1]
    if torch.is_autocast_enabled(s.device.type):
        s = s.float()  # as in `Stack.run`
    if stack.positional:
        codes = sinusoids(
            0 if state is None else state.position, width, s.shape[2], s.device, s.dtype
        )
        s = s + codes.repeat_interleave(2, 0)[:-1]
    for i, block in enumerate(stack.blocks):
        before = None if state is None else state.child(str(i))
        if stack.positional:
            s = _attention_ahead(cast("AttentionBlock", block), s, before)
        else:
            block = cast("MambaBlock", block)
            s = s + _mamba_ahead(block.mixer, block.norm(s), before)
    v = stack.out(stack.norm(s[:, ::2]))
    return Latents(v.unflatten(-1, (model.config.latents, model.config.classes)))


def _attention_ahead(block: AttentionBlock, s: Tensor, state: State | None) -> Tensor:
    batch, both, width = s.shape
    past = 0 if state is None else state.position
    q, k, v = (
        t.view(batch, both, block.heads, -1).transpose(1, 2)
        for t in block.c_attn(block.ln_1(s)).chunk(3, -1)
    )
    if state is not None:
        k, v = (torch.cat([state[n][:, :, :past], new], 2) for n, new in (("k", k), ("v", v)))
    steps = torch.arange(both, device=s.device)
    query = steps[:, None]
    mask = (steps % 2 == 1) & (steps <= query) | (steps == query)
    mask = F.pad(mask, (past, 0), value=True)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return block.finish(s, y.transpose(1, 2).reshape(batch, both, width))


def _mamba_ahead(mixer: MambaMixer, s: Tensor, state: State | None) -> Tensor:
    u, z = mixer.in_proj(s).chunk(2, -1)
    u = _convolve_ahead(mixer.conv1d, u, None if state is None else state["conv"])
    dt, B, C = mixer.x_proj(u).split([mixer.rank, mixer.states, mixer.states], -1)
    dt, bias = mixer.dt_proj(dt), mixer.dt_proj.bias
    y = scan_ahead(
        u,
        dt,
        -torch.exp(mixer.A_log.float()),
        B,
        C,
        mixer.D,
        z,
        bias,
        None if state is None else state["ssm"],
    )
    return mixer.out_proj(y)


def _convolve_ahead(conv: nn.Conv1d, u: Tensor, before: Tensor | None) -> Tensor:
    """Convolves odd steps with earlier odd ones, and each even step with those and itself."""
    weight, bias = conv.weight.squeeze(1), conv.bias
    assert bias is not None
    taps, own, x = weight.shape[1], u[:, ::2], u[:, 1::2]
    y = torch.empty_like(u, memory_format=torch.contiguous_format)
    y[:, 1::2] = causal_conv_silu(x, weight, bias, before)[0]
    if before is None:
        before = u.new_zeros(len(u), taps - 1, u.shape[2])
    seen, weight = torch.cat([before.to(u.dtype), x], 1), weight.to(u.dtype)
    total = torch.addcmul(bias.to(u.dtype), own, weight[:, -1])
    for k in range(taps - 1):
        total = torch.addcmul(total, seen[:, k : k + own.shape[1]], weight[:, k])
    y[:, ::2] = F.silu(total)
    return y
