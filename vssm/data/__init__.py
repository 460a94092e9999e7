"""Data sets as sequences: digits, mnist, cifar10, images, text, series, arrays and synthetic.

`open_data` finds (or downloads) a data set and returns a `Data`, whose splits are read lazily:

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
from vssm.data.dataset import Data, Split
from vssm.data.images import moved, open_cifar10, open_digits, open_images, open_mnist
from vssm.data.meta import Meta, steps_left
from vssm.data.series import open_series
from vssm.data.show import describe, draw, picture
from vssm.data.synthetic import open_synthetic
from vssm.data.text import open_text

__all__ = ["NAMES", "ArraysConfig", "Data", "DataConfig", "ImagesConfig", "Meta", "SeriesConfig"]
__all__ += ["Split", "SyntheticConfig", "TextConfig", "describe", "draw", "moved", "open_data"]
__all__ += ["picture", "steps_left"]

_OPENERS = {
    "digits": open_digits,
    "mnist": open_mnist,
    "cifar10": open_cifar10,
    "images": open_images,
    "text": open_text,
    "synthetic": open_synthetic,
}


def open_data(config: DataConfig, missing: bool = False) -> Data:
    """Opens the data set that `config` names; a public one is downloaded if it is not found.

    Arguments:
        config: The data options; `config.name` is one of `NAMES`.
        missing: Whether missing values of series and arrays stay NaN, as models with known="any"
            learn from them; else they are filled or refused.

    Returns:
        A `Data` whose metadata is ready and whose splits are read when first asked for.

    Example:
        >>> data = open_data(DataConfig(name="digits"))
        >>> len(data.train), len(data.valid), tuple(data.train.batch([0, 1, 2]).shape)
        (1294, 144, (3, 8, 8))
    """
    if not isinstance(config, DataConfig):
        raise ValueError(f"config={config!r} is not a DataConfig; use DataConfig(name='digits')")
    if config.name == "series":
        return open_series(config, missing)
    if config.name == "arrays":
        return open_arrays(config, missing)
    return _OPENERS[config.name](config)
