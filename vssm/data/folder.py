"""A folder of image files, grey or RGB and all of one size, read with Pillow.

The images directly in the folder count, in the order of their names; subfolders and files of other kinds do
not. They are grey if all files are, else RGB. What is transparent is laid over white, photographs are turned
as their camera says, and of an animation the first frame is taken. The pixels are then read as those of a
uint8 array are (`vssm.data.arrays`).
"""

import os
import warnings
from pathlib import Path

import numpy as np
import torch

from vssm.data.arrays import FEWEST
from vssm.data.config import DataConfig
from vssm.data.dataset import Data, Split, split_at_random
from vssm.data.files import check_unpacked, locate_folder
from vssm.data.images import image_meta

_FORMATS = {  # by the end of a name; Pillow tries no others, since some of them start programs
    ".bmp": "BMP",
    ".gif": "GIF",
    ".jpeg": "JPEG",
    ".jpg": "JPEG",
    ".pgm": "PPM",
    ".png": "PNG",
    ".ppm": "PPM",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".webp": "WEBP",
}
_GREY = ("1", "L", "LA")
_DEEP = ("I", "F")  # how modes of more than 8 bits begin


def open_images(config: DataConfig) -> Data:
    """Opens a folder of image files."""
    if config.images.path is None:
        raise ValueError("images.path is needed: a folder of images")
    folder = locate_folder(config.images.path, "images", config.dir)
    paths = _image_files(folder)
    x = _read(paths)
    num, height, width, channels = x.shape
    x = torch.from_numpy(x.reshape(num, height, width * channels))

    def split(index: np.ndarray) -> Split:
        return Split(x[index], maximum=255)

    return split_at_random(
        config, image_meta("images", (height, width, channels), 255), num, split, paths
    )


def _image_files(folder: Path) -> list[Path]:
    """Returns the images of a folder in the order of their names."""
    files = [
        Path(entry) for entry in os.scandir(folder) if entry.is_file() and entry.name[0] != "."
    ]
    images = sorted(path for path in files if path.suffix.lower() in _FORMATS)
    if len(images) < FEWEST:
        raise ValueError(
            f"{folder} has {len(images)} images directly in it; allowed: {FEWEST} or more, whose names end in"
            f" {', '.join(_FORMATS)}"
        )
    others = sorted(set(files) - set(images))
    if others:
        warnings.warn(
            f"{folder}: files left out because their names are not those of images: {len(others)};"
            f" the first is {others[0].name}",
            stacklevel=4,
        )
    return images


def _read(paths: list[Path]) -> np.ndarray:
    """Returns the pixels of images of one size, (M, H, W, C) uint8."""
    images: list[np.ndarray] = []
    for path in paths:
        image = _read_one(path)
        images.append(image)
        if image.shape[:2] != images[0].shape[:2]:
            (height, width), (first_height, first_width) = image.shape[:2], images[0].shape[:2]
            raise ValueError(
                f"{path} is an image of {width} x {height} pixels, {paths[0].name} is one of {first_width} x"
                f" {first_height}; allowed: images of one size"
            )
        check_unpacked(len(paths) * image.nbytes, path.parent)
    if len({image.shape for image in images}) > 1:  # grey images among colours
        images = [np.broadcast_to(image, (*image.shape[:2], 3)) for image in images]
    return np.stack(images)


def _read_one(path: Path) -> np.ndarray:
    """Returns the pixels of an image, (H, W, 1) or (H, W, 3) uint8."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path, formats=sorted(set(_FORMATS.values()))) as file:
            mode = file.mode
            image = ImageOps.exif_transpose(file)
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            pixels = np.asarray(image.convert("L" if mode in _GREY else "RGB"))
    except Exception as error:  # the readers of damaged files raise many kinds
        raise ValueError(
            f"{path} is damaged or no image: {' '.join(str(error).split())}"
        ) from error
    if mode.startswith(_DEEP):
        raise ValueError(
            f"{path} has pixels of more than 8 bits (mode {mode}); save it with 8 bits"
        )
    return pixels.reshape(*pixels.shape[:2], -1)
