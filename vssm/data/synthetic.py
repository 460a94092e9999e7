"""Synthetic sequences of any length: noisy waves, for speed measurements and tests.

    x_{m,t,d} = 1/2 + 2/5 sin(2 pi (f_m t + p_m + s_m d)) + u_{m,t,d} / 10

Each sequence has a frequency f_m in [1/64, 1/8], a phase p_m in [0, 1] and a shift s_m in [0, 1/4];
the noise u lies in [-1/2, 1/2]. All values lie in [0.05, 0.95]. The past of a sequence tells its
frequency, phase and shift, so there is something to learn.
"""

import numpy as np
import torch

from vssm.data.config import DataConfig, SyntheticConfig
from vssm.data.dataset import Data, Split, Stream, divided, random_bits
from vssm.data.meta import Meta


def open_synthetic(config: DataConfig) -> Data:
    """Opens waves drawn from the seed; the test set has a fifth as many as the training set."""
    options, seed = config.synthetic, config.seed
    meta = Meta(
        name="synthetic",
        features=options.features,
        length=options.length,
        suggested_head="gaussian",
    )

    def fit() -> tuple[Split, Split]:
        return divided(Split(_waves(options, options.num, seed, Stream.SYNTHETIC_TRAIN)), seed)

    def test() -> Split:
        return Split(_waves(options, options.num // 5, seed, Stream.SYNTHETIC_TEST))

    return Data(config, meta, fit, test)


def _waves(options: SyntheticConfig, num: int, seed: int, stream: int) -> torch.Tensor:
    values = num * options.length * options.features
    words = random_bits(seed, stream, 3 * num + -(-values // 2)).astype("<u8", copy=False)
    f, p, s = (words[: 3 * num].reshape(3, num, 1) >> 11) * 2.0**-53
    f, s = 1 / 64 + f * (1 / 8 - 1 / 64), s / 4
    phase = (f * np.arange(options.length) + p) % 1  # (M, T), in float64: f t grows with the length
    shift = (s * np.arange(options.features)).astype(np.float32)
    x = phase.astype(np.float32)[..., None] + shift[:, None]
    np.sin(2 * np.pi * x, out=x)
    noise = words[3 * num :].view("<u4")[: x.size].reshape(x.shape)
    return torch.from_numpy(0.45 + 0.4 * x + noise.astype(np.float32) * np.float32(0.1 * 2.0**-32))
