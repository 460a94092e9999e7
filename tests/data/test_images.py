"""Public images and folders of images: damage is named, pixels and classes stay in their places."""

import gzip
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.opening import REAL, real, refused, sha256
from vssm.data import DataConfig, ImagesConfig, files, images, moved, open_data
from vssm.data.dataset import Stream, hold_out


@pytest.mark.parametrize("inside", [False, True])
def test_mnist_loads_from_its_folder_or_the_one_above(mnist, inside):
    content = gzip.decompress((mnist / "train-images-idx3-ubyte.gz").read_bytes())
    expected = np.frombuffer(content, np.uint8, offset=16)
    data = open_data(DataConfig(name="mnist", dir=str(mnist if inside else mnist.parent)))
    train, _ = hold_out(50, seed=0)
    assert np.array_equal(data.train.x, expected.reshape(50, 28, 28)[train])
    assert data.meta.image_shape == (28, 28, 1) and data.meta.levels == 256
    assert data.meta.suggested_head == "gaussian" and len(data.test().labels) == 20


@pytest.mark.parametrize("file", ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c[:-1],
        lambda c: c + b"\0",
        lambda c: b"",
        lambda c: c[:30] + bytes((c[30] ^ 1,)) + c[31:],
    ],
)
def test_damaged_idx_is_named(mnist, damage, file):
    path = mnist / file
    path.write_bytes(damage(path.read_bytes()))
    refused(DataConfig(name="mnist", dir=str(mnist)), path, "the published one is")


@real("mnist", "train-images-idx3-ubyte.gz")
def test_mnist_has_the_published_counts():
    data = open_data(DataConfig(name="mnist", dir=REAL))
    counts = torch.bincount(torch.cat([data.train.labels, data.valid.labels])).tolist()
    assert counts == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    test = data.test()
    assert torch.bincount(test.labels).tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]
    assert len(data.valid) == 6000 and data.train.x.shape == (54000, 28, 28)


def test_binarisation_is_fixed_by_the_seed_and_follows_the_pixels():
    grey = np.tile(np.array([0, 1, 100, 254, 255], np.uint8), (40000, 1))
    bits = images.binarized(grey, 255, seed=3, stream=1)
    p = grey[0] / 255
    # five standard deviations of a mean of 40,000 draws
    assert np.all(np.abs(bits.mean(0) - p) <= 5 * np.sqrt(p * (1 - p) / 40000))
    assert np.array_equal(bits, images.binarized(grey, 255, seed=3, stream=1))
    assert not np.array_equal(bits, images.binarized(grey, 255, seed=4, stream=1))
    assert images.binarized(grey[:1, :3], 255, seed=3, stream=1).shape == (1, 3)


def test_binarised_data_is_bernoulli():
    data = open_data(DataConfig(name="digits", binarize=True))
    assert data.meta.suggested_head == "bernoulli" and data.meta.levels == 2
    assert set(data.train.batch(slice(None)).unique().tolist()) == {0.0, 1.0}


def test_cifar10_rows_keep_the_channels_of_a_pixel_together(cifar10):
    data = open_data(DataConfig(name="cifar10", dir=str(cifar10)))
    record = np.frombuffer(
        (cifar10 / "cifar-10-batches-bin" / "test_batch.bin").read_bytes(), np.uint8
    )[:3073]
    image = record[1:].reshape(3, 32, 32)
    test = data.test()
    assert test.labels[0] == record[0] and test.x.shape == (20, 32, 96)
    for row, column, channel in ((0, 0, 0), (5, 7, 1), (31, 30, 2)):
        assert test.x[0, row, 3 * column + channel] == image[channel, row, column]
        assert (
            data.meta.to_image(test.batch([0]))[0, row, column, channel] * 255
            == image[channel, row, column]
        )
    assert len(data.train) == 90 and len(data.valid) == 10


def test_cifar10_is_downloaded_and_unpacked_once(cifar10, server, tmp_path, monkeypatch):
    plain = open_data(DataConfig(name="cifar10", dir=str(cifar10)))
    archive = tmp_path / "site" / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(cifar10 / "cifar-10-batches-bin", "cifar-10-batches-bin")
    remote = files.Remote(
        f"{server}/{archive.name}", sha256(archive.read_bytes()), "cifar-10-binary.tar.gz"
    )
    monkeypatch.setattr(images, "_CIFAR10_ARCHIVE", remote)
    for _ in range(2):
        made = open_data(DataConfig(name="cifar10"))
        assert torch.equal(made.train.x, plain.train.x)
        assert torch.equal(made.test().x, plain.test().x)
        assert all(path.is_relative_to(tmp_path / "cache") for path in made.files)
        archive.unlink(missing_ok=True)  # the second time there is nothing to download


def test_damaged_cifar10_is_named(cifar10):
    config = DataConfig(name="cifar10", dir=str(cifar10))
    path = cifar10 / "cifar-10-batches-bin" / "data_batch_3.bin"
    content = path.read_bytes()
    for damaged in (content[:-1], content[:-1] + bytes((content[-1] ^ 1,))):
        path.write_bytes(damaged)
        refused(config, path, sha256(content), sha256(damaged))
    path.unlink()
    refused(config, "missing", path)


@real("cifar-10-batches-bin", "cifar10/data_batch_1.bin", "cifar10/cifar-10-batches-bin")
def test_cifar10_has_the_published_counts_and_pixels():
    data = open_data(DataConfig(name="cifar10", dir=REAL))
    assert torch.bincount(torch.cat([data.train.labels, data.valid.labels])).tolist() == [5000] * 10
    test = data.test()
    assert torch.bincount(test.labels).tolist() == [1000] * 10
    pixels = test.x.reshape(10000, 32, 32, 3).numpy()
    assert sha256(pixels) == "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"
    assert len(data.valid) == 5000


def folder_of_images(folder, num=12, size=(6, 4), mode="RGB", name="{:02d}.png"):
    """Writes random images and returns their pixels, (num, height, width[, 3])."""
    folder.mkdir(exist_ok=True)
    width, height = size
    shape = (num, height, width, 3) if mode == "RGB" else (num, height, width)
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    for k, image in enumerate(pixels):
        Image.fromarray(image).save(folder / name.format(k))
    return pixels


def images_in(folder, **options):
    return DataConfig(name="images", images=ImagesConfig(path=str(folder)), **options)


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_a_folder_of_images_is_read_in_the_order_of_names(tmp_path, mode, channels):
    pixels = folder_of_images(tmp_path / "a", mode=mode)
    data = open_data(images_in(tmp_path / "a"))
    assert data.meta.image_shape == (4, 6, channels) and data.meta.levels == 256
    assert (data.meta.features, data.meta.length, data.meta.suggested_head) == (
        6 * channels,
        4,
        "gaussian",
    )
    splits = (data.train, data.valid, data.test())
    assert [len(split) for split in splits] == [10, 1, 1] and data.train.x.dtype == torch.uint8
    rest, test = hold_out(12, 0, stream=Stream.ARRAYS)
    kept, _ = hold_out(11, 0)
    expected = torch.from_numpy(pixels[rest[kept]]).reshape(10, 4, 6 * channels).float() / 255
    assert torch.equal(data.train.batch(slice(None)), expected)
    assert torch.equal(data.test().x, torch.from_numpy(pixels[test]).reshape(1, 4, 6 * channels))
    assert [path.name for path in data.files] == [f"{k:02d}.png" for k in range(12)]


def test_grey_transparent_and_turned_images_are_read(tmp_path):
    folder = tmp_path / "a"
    folder_of_images(folder, mode="L", size=(4, 4))
    grey = Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4))
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    clear.putpixel((1, 0), (255, 0, 0, 255))
    palette = Image.new("P", (4, 4))
    palette.putpalette([1, 2, 3])
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn clockwise
    grey.save(folder / "20_turned.png", exif=turned)
    clear.save(folder / "21_clear.PNG")
    palette.save(folder / "22_palette.gif")
    Image.new("1", (4, 4), 1).save(folder / "23_black_and_white.png")
    Image.new("L", (4, 4), 200).save(folder / "24.jpg", quality=95)
    (folder / ".hidden.png").write_text("no image")
    (folder / "more").mkdir()
    (folder / "notes.txt").write_text("no image")
    data = open_data(images_in(folder))
    assert data.meta.image_shape == (4, 4, 3) and len(data.files) == 17
    x = torch.cat([data.train.x, data.valid.x, data.test().x])
    found = {image.numpy().tobytes() for image in x}
    white = np.full((4, 4, 3), 255, np.uint8)
    dot = white.copy()
    dot[0, 1] = [255, 0, 0]
    rotated = np.rot90(np.asarray(grey), -1)[..., None].repeat(3, -1)
    others = [
        white,
        dot,
        rotated,
        np.zeros_like(white) + np.array([1, 2, 3], np.uint8),
        white // 255 * 200,
    ]
    assert all(np.ascontiguousarray(image).tobytes() in found for image in others)


def test_bad_folders_of_images_are_named(tmp_path):
    folder = tmp_path / "a"
    refused(DataConfig(name="images"), "images.path is needed: a folder of images")
    refused(images_in(folder), "found no a in the place given", "--data-dir")
    folder_of_images(folder, num=9)
    refused(
        images_in(folder), f"{folder} has 9 images directly in it; put 10 or more there", ".png"
    )
    refused(images_in(folder / "00.png"), "00.png' is a file; use a folder")
    folder_of_images(folder, num=12)
    odd = folder / "05.png"
    whole = odd.read_bytes()
    Image.new("RGB", (8, 4)).save(odd)
    refused(
        images_in(folder),
        f"{odd} has 8 x 4 pixels, but 00.png has 6 x 4; all images must have one size",
    )
    Image.fromarray(np.zeros((4, 6), np.uint16)).save(odd)
    refused(images_in(folder), odd, "more than 8 bits")
    for content in (b"", b"words", whole[: len(whole) // 2], whole[:60] + b"\0" * 20 + whole[80:]):
        odd.write_bytes(content)
        refused(images_in(folder), f"{odd} is damaged or not an image: ")
    odd.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 4\n")  # would start a program
    refused(images_in(folder), f"{odd} is damaged or not an image: ")


def test_a_folder_of_images_is_found_in_the_data_folder(tmp_path):
    (tmp_path / "data" / "images").mkdir(parents=True)
    folder_of_images(tmp_path / "data" / "images" / "a")
    found = open_data(images_in("a", dir=str(tmp_path / "data")))
    assert found.files[0].parent == tmp_path / "data" / "images" / "a"
    # The absolute path of another machine: its name is looked for.
    moved = open_data(images_in("/nowhere/else/a", dir=str(tmp_path / "data")))
    assert moved.files == found.files


def test_images_are_moved_by_a_pixel_as_often_as_asked():
    x = torch.rand(2000, 5, 4 * 3)
    made = moved(x, 0.6, 3, torch.Generator().manual_seed(0))
    # What comes to a pixel off the edges is one of its neighbours, with all of its channels.
    image, given = made.view(2000, 5, 4, 3), x.view(2000, 5, 4, 3)
    steps = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    found = torch.stack([(image[:, 2, 1] == given[:, 2 + i, 1 + j]).all(-1) for i, j in steps])
    assert (found.sum(0) == 1).all()
    counts = dict(zip(steps, found.sum(1).tolist(), strict=True))
    assert abs(counts.pop((0, 0)) - 2000 * (0.4 + 0.6 / 9)) < 120
    assert all(abs(count - 2000 * 0.6 / 9) < 60 for count in counts.values())
    up = found[steps.index((-1, 0))]
    assert torch.equal(made[up][:, 1:], x[up][:, :-1]) and torch.equal(made[up][:, 0], x[up][:, 0])
    # Parts of a batch are moved as the whole is.
    parts = [
        moved(x[i * 500 :][:500], 0.6, 3, torch.Generator().manual_seed(0), (i, 4))
        for i in range(4)
    ]
    assert torch.equal(torch.cat(parts), made)
    assert torch.equal(moved(x, 0.0, 3), x)
