"""Variational models: vssm (Mamba blocks) and tvae (GPT-2 blocks). One class; the kind chooses the
block.

    prior              p(z_t) = 1 / N^Z                               uniform, for every step
    posterior          q_psi(z_t | x_{1:t})          = D(z_t | v_t)   v = f_enc(x)
    partial posterior  q_omega(z_t | x_{1:min(C,t)}) = D(z_t | v̄_t)   v̄ = f_par(x_{1:C}, ∅, ...)
    likelihood         p_phi(x_t | z_{1:t})          = P(x_t | w_t)   w = f_dec(z)

Given z the x_t are independent, and given x the z_t are. So everything is drawn at once.

Legend: x (B, T, D), or (B, T) tokens; z (B, T, Z) classes, or (B, T, Z, N) one-hot in training;
v, v̄ (B, T, Z, N); w (B, T, size of the head); C the cut, or length of the prompt.
"""

import torch
from torch import Tensor

from vssm.config import ModelConfig
from vssm.distributions import Latents, Observation
from vssm.models.base import BaseModel
from vssm.nn import LatentEmbedding, Stack, State, embedding


class Variational(BaseModel):
    """Creates a vssm or tvae: three stacks, encoder, partial posterior and decoder.

    Example:
        >>> config = ModelConfig(kind="vssm", features=3, width=8, layers=1, latents=4, classes=5)
        >>> model, x = Variational(config), torch.zeros(2, 6, 3)
        >>> q_z, _ = model.posterior(x)
        >>> z = q_z.sample(torch.rand(2, 6, 4))
        >>> p_x, state = model.likelihood(z)
        >>> p_x.log_prob(x).shape, state.position
        (torch.Size([2, 6]), 6)
        >>> model.partial_posterior(x[:, :2], empty=4)[0].log_prob(z).shape
        torch.Size([2, 6])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        codes = config.latents * config.classes
        self.encoder: Stack = Stack(config, embedding(config), codes)
        self.partial: Stack = Stack(config, embedding(config), codes, blank=True)
        self.decoder: Stack = Stack(
            config, LatentEmbedding(config.latents, config.classes, config.width), self.head.size
        )

    def posterior(self, x: Tensor, state: State | None = None) -> tuple[Latents, State]:
        """Returns q_psi(z_t | x_{1:t}) for all steps, and the state of the encoder."""
        v, after = self.encoder(x, state)
        return self._latents(v), after

    def partial_posterior(
        self,
        x: Tensor | None = None,
        cut: Tensor | None = None,
        empty: int = 0,
        state: State | None = None,
    ) -> tuple[Latents, State]:
        """Returns q_omega(z_t | x_{1:min(C,t)}) for the steps of x and `empty` steps after it.

        Arguments:
            x: The known steps, (B, C, D); may be missing when there are empty steps.
            cut: For training, one length C for each row, (B,): steps of x from C on are hidden.
            empty: The number of empty tokens after x.
            state: The state to continue from.
        """
        batch = len(x) if x is not None else 1 if state is None else state.batch
        e = self.partial.blanks(batch, empty)
        if x is not None:
            known = self.partial.embed(x)
            if cut is not None:
                hidden = torch.arange(x.shape[1], device=x.device) >= cut[:, None]
                known = torch.where(hidden[..., None], self.partial.blanks(1, 1), known)
            e = torch.cat([known, e], 1) if empty else known
        v, after = self.partial.run(e, state)
        return self._latents(v), after

    def likelihood(self, z: Tensor, state: State | None = None) -> tuple[Observation, State]:
        """Returns p_phi(x_t | z_{1:t}) for all steps, and the state of the decoder."""
        w, after = self.decoder(z, state)
        return self.head(w), after

    def _latents(self, v: Tensor) -> Latents:
        return Latents(v.unflatten(-1, (self.config.latents, self.config.classes)))
