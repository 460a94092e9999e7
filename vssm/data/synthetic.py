"""Synthetic sequences of any length: noisy waves, for speed measurements and tests.

    x_{m,t,d} = 1/2 + 2/5 sin(2 pi (f_m t + p_m + s_m d)) + u_{m,t,d} / 10

with a frequency f_m in [1/64, 1/8], a phase p_m in [0, 1] and a shift s_m in [0, 1/4] a sequence, and
noise u in [-1/2, 1/2]. All values lie in [0.05, 0.95]. The past of a sequence tells its frequency, phase
and shift, so a model can learn something, and two steps are never independent.
"""

import numpy as np
import torch

from vssm.data.config import DataConfig
from vssm.data.dataset import (
    SYNTHETIC_TEST,
    SYNTHETIC_TRAIN,
    Data,
    Meta,
    Split,
    hold_out,
    random_bits,
)


def open_synthetic(config: DataConfig) -> Data:
    """Opens waves drawn from the seed; the test set has a fifth as many as the training set."""
    options = config.synthetic
    meta = Meta(
        name="synthetic",
        features=options.features,
        length=options.length,
        suggested_head="gaussian",
    )

    def fit() -> tuple[Split, Split]:
        x = torch.from_numpy(
            _waves(options.num, options.length, options.features, config.seed, SYNTHETIC_TRAIN)
        )
        train, valid = hold_out(options.num, config.seed)
        return Split(x[train]), Split(x[valid])

    def test() -> Split:
        num = options.num // 5
        return Split(
            torch.from_numpy(
                _waves(num, options.length, options.features, config.seed, SYNTHETIC_TEST)
            )
        )

    return Data(config, meta, fit, test, checksum="computed")


def _waves(num: int, length: int, features: int, seed: int, stream: int) -> np.ndarray:
    words = random_bits(seed, stream, 3 * num + -(-num * length * features // 2)).astype(
        "<u8", copy=False
    )
    f, p, s = (words[: 3 * num].reshape(3, num, 1) >> 11) * 2.0**-53
    f, s = 1 / 64 + f * (1 / 8 - 1 / 64), s / 4
    phase = (f * np.arange(length) + p) % 1  # (M, T), in float64: f t grows with the length
    x = phase.astype(np.float32)[..., None] + (s * np.arange(features)).astype(np.float32)[:, None]
    np.sin(2 * np.pi * x, out=x)
    noise = words[3 * num :].view("<u4")[: x.size].reshape(x.shape)
    return 0.45 + 0.4 * x + noise.astype(np.float32) * np.float32(0.1 * 2.0**-32)
