"""Data sets as sequences: digits, mnist, cifar10, images, text, series, arrays and synthetic.

`open_data` finds (or downloads) a data set and returns a `Data` with lazily read splits:

    data = open_data(DataConfig(name="mnist"))
    x = data.train.batch(torch.arange(64))      # (64, 28, 28) in [0, 1]
    data.valid                                  # 10 % of the training set, fixed by `config.seed`
    data.test()                                 # read by evaluation only
    data.meta                                   # what generation needs, JSON-serialisable
"""

from vssm.data.arrays import open_arrays
from vssm.data.config import (
    NAMES,
    ArraysConfig,
    DataConfig,
    ImagesConfig,
    SeriesConfig,
    SyntheticConfig,
    TextConfig,
)
from vssm.data.dataset import Data, Meta, Split, read_meta, steps_left
from vssm.data.folder import open_images
from vssm.data.images import open_cifar10, open_digits, open_mnist
from vssm.data.series import open_series
from vssm.data.show import describe, draw, picture
from vssm.data.synthetic import open_synthetic
from vssm.data.text import open_text

__all__ = [
    "NAMES",
    "ArraysConfig",
    "Data",
    "DataConfig",
    "ImagesConfig",
    "Meta",
    "SeriesConfig",
    "Split",
    "SyntheticConfig",
    "TextConfig",
    "describe",
    "draw",
    "open_data",
    "picture",
    "read_meta",
    "steps_left",
]

_OPENERS = {
    "digits": open_digits,
    "mnist": open_mnist,
    "cifar10": open_cifar10,
    "images": open_images,
    "text": open_text,
    "series": open_series,
    "arrays": open_arrays,
    "synthetic": open_synthetic,
}
assert tuple(_OPENERS) == NAMES


def open_data(config: DataConfig) -> Data:
    """Returns the data set that `config` names, downloading it when it is public and not found.

    Arguments:
        config: The data options; `config.name` is one of `NAMES`.

    Returns:
        A `Data` whose metadata is ready and whose splits are read when first asked for.

    Example:
        >>> data = open_data(DataConfig(name="digits"))
        >>> len(data.train), len(data.valid), tuple(data.train.batch([0, 1, 2]).shape)
        (1294, 144, (3, 8, 8))
    """
    if not isinstance(config, DataConfig):
        raise ValueError(
            f"config={config!r} is not allowed; allowed: a DataConfig, as DataConfig(name='digits')"
        )
    return _OPENERS[config.name](config)
