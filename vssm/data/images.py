"""Images as sequences of rows: digits, mnist and cifar10, and folders of your own image files.

An image (H, W, C) is a sequence of T = H steps with D = W C features, channels last within a pixel.
Pixels stay uint8 in memory.

Images that lie directly in a folder are read in the order of their names. All must have one size;
they are grey if all files are, else RGB. Transparent parts are laid over white, photographs are
turned upright by their EXIF tag, and of an animation the first frame is read.
"""

import gzip
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from vssm.data.config import DataConfig
from vssm.data.dataset import Data, Split, Stream, divided, hold_out, random_bits, split_at_random
from vssm.data.files import Remote, locate, locate_own, read_published
from vssm.data.meta import Meta

Labelled = tuple[np.ndarray, np.ndarray]  # (M, H, W, C) uint8 pixels, (M,) uint8 classes

FEWEST = 10  # sequences or images of the user's own

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST = {  # file: sha256 of its .gz
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
CIFAR10 = {  # file: sha256
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
_CIFAR10_ARCHIVE = Remote(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    file="cifar-10-binary.tar.gz",
)
_CIFAR10_FOLDERS = ("cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-bin")
_CIFAR10_FOLDERS += ("cifar-10-binary.tar.gz.untar/cifar-10-batches-bin",)  # as pooch unpacks it
_CIFAR10_RECORD = 1 + 3 * 32 * 32  # a class, then the red, green and blue planes
# Other formats are not tried, since Pillow starts programs to read some of them.
_FORMATS = ("BMP", "GIF", "JPEG", "PPM", "PNG", "TIFF", "WEBP")
_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def image_meta(
    name: str, shape: tuple[int, int, int], maximum: int | None, classes: int | None = None
) -> Meta:
    """Describes images (height, width, channels) of values 0 .. `maximum`, or any in [0, 1]."""
    height, width, channels = shape
    return Meta(
        name=name,
        features=width * channels + (classes or 0),
        length=height,
        suggested_head="bernoulli" if maximum == 1 else "gaussian",
        levels=None if maximum is None else maximum + 1,
        image_shape=shape,
        classes=classes,
    )


def _image_data(
    config: DataConfig,
    shape: tuple[int, int, int],
    maximum: int,
    read: Callable[[bool], Labelled],
    files: Sequence[Path] = (),
) -> Data:
    """Returns images with values 0 .. `maximum`; `read` reads the test set if True."""
    stored, classes = 1 if config.binarize else maximum, 10 if config.labels else 0
    meta = image_meta(config.name, shape, stored, classes or None)

    def whole(test: bool) -> Split:
        pixels, labels = read(test)
        if config.binarize:
            stream = Stream.BINARIZE_TEST if test else Stream.BINARIZE_TRAIN
            pixels = binarized(pixels, maximum, config.seed, stream)
        x = torch.from_numpy(pixels.reshape(len(pixels), meta.length, -1))
        return Split(x, torch.from_numpy(labels.astype(np.int64)), stored, classes=classes)

    return Data(
        config, meta, lambda: divided(whole(False), config.seed), lambda: whole(True), files
    )


def binarized(images: np.ndarray, maximum: int, seed: int, stream: int) -> np.ndarray:
    """Returns one draw of 0 or 1 for each pixel, 1 with probability pixel / maximum."""
    words = random_bits(seed, stream, -(-images.size // 4)).astype("<u8", copy=False)
    uniform = words.view("<u2")[: images.size].reshape(images.shape) % maximum
    return (uniform < images).astype(np.uint8)


def open_digits(config: DataConfig) -> Data:
    """Opens the 1,797 digits that ship with the package, the same as scikit-learn's.

    A fifth of them, the same for every seed, is the test set.

    References:
        Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998), CC BY 4.0
        https://doi.org/10.24432/C50P49
    """

    def read(test: bool) -> Labelled:
        with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
            images, labels = file["pixels"][..., None], file["labels"]
        index = hold_out(len(images), seed=0, fraction=0.2, stream=Stream.DIGITS)[test]
        return images[index], labels[index]

    return _image_data(config, (8, 8, 1), 16, read)


def open_mnist(config: DataConfig) -> Data:
    """Opens MNIST from its four packed IDX files."""
    paths = []
    for name, sha256 in MNIST.items():
        remote = Remote(f"{MNIST_URL}{name}.gz", sha256, f"mnist/{name}.gz")
        paths.append(locate(f"{name}.gz", ("mnist", "MNIST/raw"), config.dir, remote))

    def read(test: bool) -> Labelled:
        images, labels = (_read_idx(path) for path in (paths[2:] if test else paths[:2]))
        return images.reshape(-1, 28, 28, 1), labels

    return _image_data(config, (28, 28, 1), 255, read, paths)


def _read_idx(path: Path) -> np.ndarray:
    """Returns the values of an IDX file, which begins with 0 0 8, the rank and 32-bit sizes."""
    content = gzip.decompress(read_published(path, MNIST[path.stem]))
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).copy()


def open_cifar10(config: DataConfig) -> Data:
    """Opens CIFAR-10 from the six files of its official binary version."""
    first, *_ = CIFAR10
    found = locate(first, _CIFAR10_FOLDERS, config.dir, _CIFAR10_ARCHIVE, unpack=True)
    files = [found.with_name(name) for name in CIFAR10]
    if missing := [path for path in files if not path.is_file()]:
        raise ValueError(f"cifar10 is incomplete: {missing[0]} is missing")

    def read(test: bool) -> Labelled:
        own = files[-1:] if test else files[:-1]
        content = b"".join(read_published(path, CIFAR10[path.name]) for path in own)
        records = np.frombuffer(content, np.uint8).reshape(-1, _CIFAR10_RECORD)
        planes = records[:, 1:].reshape(-1, 3, 32, 32)
        return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, 0]

    return _image_data(config, (32, 32, 3), 255, read, files)


def open_images(config: DataConfig) -> Data:
    """Opens a folder of image files."""
    folder = locate_own(config)
    files = sorted(path for path in folder.iterdir() if path.name[0] != ".")
    paths = [path for path in files if path.suffix.lower() in _SUFFIXES]
    if len(paths) < FEWEST:
        raise ValueError(
            f"{folder} has {len(paths)} images directly in it; put {FEWEST} or more there, whose"
            f" names end in {', '.join(_SUFFIXES)}"
        )
    images = [_read_image(path) for path in paths]
    height, width = images[0].shape[:2]
    for path, image in zip(paths, images, strict=True):
        if image.shape[:2] != (height, width):
            raise ValueError(
                f"{path} has {image.shape[1]} x {image.shape[0]} pixels, but {paths[0].name} has"
                f" {width} x {height}; all images must have one size"
            )
    shape = (height, width, max(image.shape[2] for image in images))
    meta = image_meta("images", shape, 255)
    pixels = np.stack([np.broadcast_to(image, shape) for image in images])
    x = torch.from_numpy(pixels.reshape(len(images), meta.length, meta.features))
    return split_at_random(config, meta, Split(x, maximum=255), paths)


def _read_image(path: Path) -> np.ndarray:
    """Returns the pixels of an image, (H, W, 1) or (H, W, 3) uint8."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path, formats=_FORMATS) as file:
            if file.mode.startswith(("I", "F")):
                raise ValueError("its pixels have more than 8 bits; save it with 8 bits")
            grey = file.mode in ("1", "L", "LA")
            image = ImageOps.exif_transpose(file)
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            pixels = np.asarray(image.convert("L" if grey else "RGB"))
    except Exception as error:  # the readers of damaged files raise many kinds
        why = " ".join(str(error).split())
        raise ValueError(f"{path} is damaged or not an image: {why}") from error
    return pixels.reshape(*pixels.shape[:2], -1)


def moved(
    x: torch.Tensor,
    share: float,
    channels: int,
    generator: torch.Generator | None = None,
    shard: tuple[int, int] = (0, 1),
) -> torch.Tensor:
    """Moves a `share` of images (B, height, width * channels) by up to one row and one column.

    Steps of -1, 0 and 1 are equally likely, and edges are repeated. `shard` is the part of a larger
    batch that x is, as for `vssm.objective`.
    """
    index, count = shard
    (batch, height, size), device = x.shape, x.device
    draws = torch.rand(3, batch * count, dtype=torch.float32, device=device, generator=generator)
    chosen, *places = draws[:, index * batch : (index + 1) * batch].unbind()
    image = x.reshape(batch, height, size // channels, channels)
    for axis, place in enumerate(places, 1):
        length = image.shape[axis]
        step = ((3 * place).long() - 1) * (chosen < share)
        source = (torch.arange(length, device=device) + step[:, None]).clamp(0, length - 1)
        view = [batch, 1, 1, 1]
        view[axis] = length
        image = image.gather(axis, source.view(view).expand(image.shape))
    return image.reshape(x.shape)
