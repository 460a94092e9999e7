"""Public images as sequences of rows: digits (8 x 8), mnist (28 x 28) and cifar10 (32 x 32 x 3).

An image (H, W, C) is a sequence of T = H steps with D = W C features, channels last within a pixel.
Pixels stay uint8 in memory. Files are compared with their published sha256 whenever they are read.
"""

import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from vssm.data.config import DataConfig
from vssm.data.dataset import (
    BINARIZE_TEST,
    BINARIZE_TRAIN,
    DIGITS,
    Data,
    Meta,
    Split,
    hold_out,
    random_bits,
)
from vssm.data.files import Remote, check_sha256, locate, read_bytes

Labelled = tuple[np.ndarray, np.ndarray]  # (M, H, W, C) uint8 pixels, (M,) uint8 classes

_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_MNIST = {  # file: (shape, sha256 of the .gz, sha256 of its content)
    "train-images-idx3-ubyte": (
        (60000, 28, 28),
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    "train-labels-idx1-ubyte": (
        (60000,),
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    "t10k-images-idx3-ubyte": (
        (10000, 28, 28),
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    "t10k-labels-idx1-ubyte": (
        (10000,),
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
}
_CIFAR10 = {  # file: sha256
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
_CIFAR10_RECORD = 1 + 3 * 32 * 32  # a class, then the red, green and blue planes
_CIFAR10_BYTES = 10000 * _CIFAR10_RECORD


def image_meta(name: str, shape: tuple[int, int, int], maximum: int | None) -> Meta:
    """Describes images of (height, width, channels) with values 0 .. `maximum`, or any in [0, 1] for None."""
    height, width, channels = shape
    return Meta(
        name=name,
        features=width * channels,
        length=height,
        suggested_head="bernoulli" if maximum == 1 else "gaussian",
        levels=None if maximum is None else maximum + 1,
        image_shape=shape,
    )


def _image_data(
    config: DataConfig,
    shape: tuple[int, int, int],
    maximum: int,
    read_train: Callable[[], Labelled],
    read_test: Callable[[], Labelled],
    files: list[Path],
    checksum: str,
) -> Data:
    """Returns images of `shape` and values 0 .. `maximum`, one tenth of the training set held out."""
    meta = image_meta(config.name, shape, 1 if config.binarize else maximum)

    def split(images: np.ndarray, labels: np.ndarray) -> Split:
        x = torch.from_numpy(images.reshape(-1, meta.length, meta.features))
        return Split(
            x, torch.from_numpy(labels.astype(np.int64)), 1 if config.binarize else maximum
        )

    def binarized(images: np.ndarray, stream: int) -> np.ndarray:
        return _binarize(images, maximum, config.seed, stream) if config.binarize else images

    def fit() -> tuple[Split, Split]:
        images, labels = read_train()
        images = binarized(images, BINARIZE_TRAIN)
        train, valid = hold_out(len(images), config.seed)
        return split(images[train], labels[train]), split(images[valid], labels[valid])

    def test() -> Split:
        images, labels = read_test()
        return split(binarized(images, BINARIZE_TEST), labels)

    return Data(config, meta, fit, test, files, checksum)


def _binarize(images: np.ndarray, maximum: int, seed: int, stream: int) -> np.ndarray:
    """Returns one draw of 0 or 1 a pixel, 1 with probability pixel / maximum."""
    words = random_bits(seed, stream, -(-images.size // 4)).astype("<u8", copy=False)
    uniform = words.view("<u2")[: images.size].reshape(images.shape) % maximum
    return (uniform < images).astype(np.uint8)


def open_digits(config: DataConfig) -> Data:
    """Opens scikit-learn's digits; a fifth of them, the same for every seed, is the test set."""

    def read(part: int) -> Labelled:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        images = np.asarray(pixels).reshape(-1, 8, 8, 1)
        index = hold_out(len(images), seed=0, fraction=0.2, stream=DIGITS)[part]
        return images[index].astype(np.uint8), np.asarray(labels)[index].astype(np.uint8)

    return _image_data(
        config, (8, 8, 1), 16, lambda: read(0), lambda: read(1), [], "part of scikit-learn"
    )


def open_mnist(config: DataConfig) -> Data:
    """Opens MNIST from its four IDX files, packed or not."""
    paths = []
    for name, (_, packed_sha256, _) in _MNIST.items():
        remote = Remote(f"{_MNIST_URL}{name}.gz", packed_sha256, f"mnist/{name}.gz")
        paths.append(locate((name, f"{name}.gz"), ("mnist", "MNIST/raw"), config.dir, remote))
    train_images, train_labels, test_images, test_labels = paths

    def read(images: Path, labels: Path) -> Labelled:
        return _read_mnist(images)[..., None], _read_mnist(labels)

    return _image_data(
        config,
        (28, 28, 1),
        255,
        lambda: read(train_images, train_labels),
        lambda: read(test_images, test_labels),
        paths,
        "compared with the published sha256",
    )


def _read_mnist(path: Path) -> np.ndarray:
    shape, _, published = _MNIST[path.name.removesuffix(".gz")]
    header = 4 + 4 * len(shape)
    content = read_bytes(path, limit=header + int(np.prod(shape)) + 1)
    array = _parse_idx(content, shape, path)
    check_sha256(content, published, path)
    return array


def _parse_idx(content: bytes, shape: tuple[int, ...], path: Path) -> np.ndarray:
    """Returns the uint8 array of an IDX file: 0 0 8 rank, the sizes in big-endian order, the values."""
    header = 4 + 4 * len(shape)
    magic = bytes((0, 0, 8, len(shape)))
    if content[:4] != magic:
        raise ValueError(
            f"{path} is no IDX file: it begins with {content[:4].hex()}, not {magic.hex()}"
        )
    if len(content) < header:
        raise ValueError(
            f"{path} is truncated: {len(content)} bytes are less than its header of {header}"
        )
    sizes = struct.unpack(f">{len(shape)}I", content[4:header])
    if sizes != shape:
        raise ValueError(f"{path} holds an array of {sizes}, expected {shape}")
    if len(content) - header != np.prod(shape):
        less = "truncated" if len(content) - header < np.prod(shape) else "too long"
        raise ValueError(f"{path} is {less}: its header promises {np.prod(shape)} values")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()


def open_cifar10(config: DataConfig) -> Data:
    """Opens CIFAR-10 from its official binary version, unpacked or as the archive it comes in."""
    names = ("data_batch_1.bin", _CIFAR10_ARCHIVE.file)
    found = locate(names, _CIFAR10_FOLDERS, config.dir, _CIFAR10_ARCHIVE)
    if found.suffix == ".bin":
        files = [found.parent / name for name in _CIFAR10]
        if missing := [str(path) for path in files if not path.is_file()]:
            raise ValueError(
                f"cifar10 is incomplete, these files are missing: {', '.join(missing)}"
            )
    else:
        files = [found]
    *train, test = _CIFAR10
    return _image_data(
        config,
        (32, 32, 3),
        255,
        lambda: _read_cifar10(found, train),
        lambda: _read_cifar10(found, [test]),
        files,
        "compared with the published sha256",
    )


def _read_cifar10(found: Path, names: list[str]) -> Labelled:
    """Returns the images (M, 32, 32, 3) and classes of some batches, beside `found` or inside it."""
    if found.suffix == ".bin":
        contents = {
            name: read_bytes(found.parent / name, limit=_CIFAR10_BYTES + 1) for name in names
        }
    else:
        contents = _read_archive(found, names)
    parts = []
    for name, content in contents.items():
        path = found.parent / name if found.suffix == ".bin" else found / name
        if len(content) != _CIFAR10_BYTES:
            size = f"{len(content)} bytes" if len(content) < _CIFAR10_BYTES else "more bytes"
            raise ValueError(
                f"{path} has {size}, expected {_CIFAR10_BYTES} (10000 records of {_CIFAR10_RECORD})"
            )
        check_sha256(content, _CIFAR10[name], path)
        parts.append(np.frombuffer(content, np.uint8).reshape(-1, _CIFAR10_RECORD))
    records = np.concatenate(parts)
    planes = records[:, 1:].reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, 0]


def _read_archive(archive: Path, names: list[str]) -> dict[str, bytes]:
    """Returns the content of members, read in memory: nothing is extracted, so no path can escape."""
    wanted = {f"cifar-10-batches-bin/{name}": name for name in names}
    contents = {}
    try:
        with tarfile.open(
            archive, "r|gz"
        ) as tar:  # a stream: going back would mean unpacking again
            for member in tar:
                if member.name in wanted and member.isfile() and (file := tar.extractfile(member)):
                    contents[wanted[member.name]] = file.read(_CIFAR10_BYTES + 1)
                if len(contents) == len(names):
                    break
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{archive} cannot be read: {error}") from error
    if missing := [name for name in names if name not in contents]:
        raise ValueError(
            f"{archive} is not the binary version of CIFAR-10: it has no {', '.join(missing)}"
        )
    return {name: contents[name] for name in names}
