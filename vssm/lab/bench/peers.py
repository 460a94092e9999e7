"""Models of transformers, of the size of our stacks, with the input and output projections of ours.

    mean of x_t = out(body(start, in(x_1), ..., in(x_{t-1})))          body: GPT2Model or MambaModel

Legend: x (B, T, D).
"""

import importlib.util

import torch
from torch import Tensor, nn

__all__ = ["PEERS", "Peer", "absence", "remark"]

PEERS = ("transformers_gpt2", "transformers_mamba")


def absence() -> str | None:
    """Says why the peers can not run here, or None when they can be tried."""
    if importlib.util.find_spec("transformers") is None:
        return "not installed: transformers (pip install 'vssm[dev]')"
    return None


def remark(peer: str) -> str | None:
    """Says what to know about a peer's numbers here, if anything."""
    if peer == "transformers_mamba" and importlib.util.find_spec("mamba_ssm") is None:
        return "in plain PyTorch, since mamba_ssm is not installed"
    return None


class Peer(nn.Module):
    """Creates an autoregressive model around a body of transformers.

    Arguments:
        name: "transformers_gpt2" or "transformers_mamba".
        features: D.
        width: Width of the body.
        layers: Blocks of the body.
        steps: The longest sequence, for GPT-2's table of positions.
    """

    def __init__(self, name: str, features: int, width: int, layers: int, steps: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2Model, MambaConfig, MambaModel

        self.name = name
        if name == "transformers_gpt2":
            config = GPT2Config(
                vocab_size=1,
                n_positions=steps,
                n_embd=width,
                n_layer=layers,
                n_head=8,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
            )
            self.body = GPT2Model(config)
        else:
            self.body = MambaModel(
                MambaConfig(vocab_size=1, hidden_size=width, num_hidden_layers=layers)
            )
        self.start = nn.Parameter(torch.zeros(width))
        self.into, self.out = nn.Linear(features, width), nn.Linear(width, features)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the means of all steps, each from the steps before it."""
        start = self.start.expand(len(x), 1, -1).to(x.dtype)
        e = torch.cat([start, self.into(x[:, :-1]).to(x.dtype)], 1)
        return self.out(self.body(inputs_embeds=e, use_cache=False).last_hidden_state)

    @torch.no_grad()
    def generate(self, num: int, length: int) -> Tensor:
        """Returns new sequences, step by step with the body's own cache and noise of 0.1."""
        key = "past_key_values" if self.name == "transformers_gpt2" else "cache_params"
        e, cache, xs = self.start.expand(num, 1, -1), None, []
        for _ in range(length):
            made = self.body(inputs_embeds=e, use_cache=True, **{key: cache})
            cache = getattr(made, key)
            mean = self.out(made.last_hidden_state)
            xs.append(mean + 0.1 * torch.randn_like(mean))
            e = self.into(xs[-1])
        return torch.cat(xs, 1)
