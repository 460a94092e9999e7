"""The Fréchet distance between two sets of images, in the feature space of a small classifier.

    FD(a, b) = |μ_a - μ_b|² + tr(Σ_a) + tr(Σ_b) - 2 tr((Σ_a Σ_b)^{1/2})

With centred features X = Q R (an orthogonal Q) and Σ = Xᵀ X / (M - 1), the last trace is the sum of
the singular values of R_a R_bᵀ over sqrt((M_a - 1)(M_b - 1)). No matrix is squared or rooted, so a
singular covariance costs no precision and gives no NaN.

The classifier's recipe is fixed, so that figures compare: 3 x 3 convolutions with ReLU, a layer of
ReLU features and a linear output, trained by Adam with Gaussian noise on its input.

Legend: images (M, H, W, C), clamped to [0, 1]; features (M, 64) float64; μ (64,); Σ (64, 64), which
is not formed; R (min(M, 64), 64), divided by sqrt(M - 1).
"""

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.data.files import cache_folder
from vssm.data.storage import read_tensors, write_tensors

_RECIPE = {
    "channels": [32, 64, 128],
    "strides": [1, 2, 2],
    "features": 64,
    "learning_rate": 1e-3,
    "batch": 256,
    "epochs": 4,
    "noise": 0.05,
    "seed": 1,
}
_IMAGES_PER_PASS = 1000
# Convolutions in float32, the same each time: cuDNN would round to the 10 bits of TF32.
_exact = partial(torch.backends.cudnn.flags, enabled=True, deterministic=True, allow_tf32=False)

Progress = Callable[[int, int], None]
"""Called with the number of steps done and the total."""


class Classifier(nn.Module):
    """A small convolutional classifier in float32; its last hidden layer is the feature space.

    `shape` is the height, width and channels of an image.

    Example:
        >>> classifier = Classifier((8, 8, 1), num_classes=10)
        >>> classifier(torch.zeros(3, 8, 8, 1)).shape
        torch.Size([3, 10])
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        height, width, before = shape
        self.convolutions: nn.ModuleList = nn.ModuleList()
        exact: Any = {"dtype": torch.float32}  # whatever the default of PyTorch is
        for channels, stride in zip(_RECIPE["channels"], _RECIPE["strides"], strict=True):
            self.convolutions.append(nn.Conv2d(before, channels, 3, stride, padding=1, **exact))
            height, width, before = -(-height // stride), -(-width // stride), channels
        num = _RECIPE["features"]
        self.hidden: nn.Linear = nn.Linear(height * width * before, num, **exact)
        self.out: nn.Linear = nn.Linear(num, num_classes, **exact)

    def features(self, images: Tensor) -> Tensor:
        """Maps images (B, H, W, C) to features (B, 64)."""
        x = images.movedim(-1, 1)
        for convolution in self.convolutions:
            x = F.relu(convolution(x))
        return F.relu(self.hidden(x.flatten(1)))

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (B, H, W, C) to the logits of the classes, (B, num_classes)."""
        return self.out(self.features(images))


def train_classifier(
    images: Tensor,
    labels: Tensor,
    num_classes: int,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Classifier:
    """Trains the classifier by the fixed recipe on images (M, H, W, C) and their labels (M,).

    The random numbers are the same on every device. `progress` is called after every step with
    (done, total). The classifier is returned without gradients.

    Example:
        >>> images = torch.rand(20, 8, 8, 1)
        >>> classifier = train_classifier(images, torch.arange(20) % 2, num_classes=2)
        >>> features(classifier, images).shape
        torch.Size([20, 64])
    """
    classifier = _first_weights(images, num_classes).to(device)
    generator = torch.Generator().manual_seed(_RECIPE["seed"])
    optimizer = torch.optim.Adam(classifier.parameters(), lr=_RECIPE["learning_rate"])
    batch, epochs = _RECIPE["batch"], _RECIPE["epochs"]
    total, done = epochs * math.ceil(len(images) / batch), 0
    with torch.enable_grad(), _exact():
        for _ in range(epochs):
            for index in torch.randperm(len(images), generator=generator).split(batch):
                x = images[index.to(images.device)].float().clamp(0, 1)
                noise = torch.randn(x.shape, generator=generator, dtype=torch.float32)
                logits = classifier(x.to(device) + (noise * _RECIPE["noise"]).to(device))
                loss = F.cross_entropy(logits, labels[index.to(labels.device)].to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                done += 1
                if progress is not None:
                    progress(done, total)
    return classifier.requires_grad_(False)


def _first_weights(images: Tensor, num_classes: int) -> Classifier:
    height, width, channels = images.shape[1:]
    with torch.random.fork_rng(devices=[]):  # leaves the caller's random state alone
        torch.default_generator.manual_seed(_RECIPE["seed"])  # torch.manual_seed also seeds GPUs
        return Classifier((height, width, channels), num_classes)


def cached_classifier(
    images: Tensor, labels: Tensor, num_classes: int, device: torch.device, progress: Progress
) -> Classifier:
    """Trains the classifier as `train_classifier` does, or reads what an earlier call wrote.

    It is a file in the user's cache, one for each recipe, set of images, version of torch and kind
    of device. A cache that cannot be read or written costs time, no more.
    """
    recipe = {**_RECIPE, "num_classes": num_classes, "shape": list(images.shape)}
    recipe |= {"torch": torch.__version__, "device": device.type}
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode())
    for tensor in (images.float(), labels.long()):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    path = cache_folder() / "classifiers" / f"{digest.hexdigest()[:20]}.safetensors"
    with suppress(ValueError, OSError):  # the file is not there, or damaged
        tensors, _ = read_tensors(path)
        classifier = _first_weights(images, num_classes)
        classifier.load_state_dict(tensors)
        progress(1, 1)
        return classifier.to(device).requires_grad_(False)
    classifier = train_classifier(images, labels, num_classes, device, progress)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, classifier.state_dict())
    return classifier


@torch.no_grad()
def features(classifier: Classifier, images: Tensor) -> Tensor:
    """Returns the features of images on any device, (M, 64) float64 on the CPU."""
    parts, device = [], classifier.out.weight.device
    with _exact():
        for part in images.split(_IMAGES_PER_PASS):
            parts.append(classifier.features(part.to(device).float().clamp(0, 1)).double().cpu())
    return torch.cat(parts)


def frechet_distance(features_a: Tensor, features_b: Tensor) -> float:
    """Returns the Fréchet distance between the Gaussians fitted to two sets of features.

    The features are (M_a, F) and (M_b, F), at least two rows of finite numbers each.

    Example:
        >>> a = torch.tensor([[0.0], [2.0], [4.0]])     # mean 2, deviation 2
        >>> b = torch.tensor([[4.0], [5.0], [6.0]])     # mean 5, deviation 1
        >>> round(frechet_distance(a, b), 6)            # (2 - 5)² + (2 - 1)²
        10.0
    """
    mean_a, root_a = _gaussian(features_a)
    mean_b, root_b = _gaussian(features_b)
    overlap = torch.linalg.svdvals(root_a @ root_b.T).sum()
    squares = (mean_a - mean_b).square().sum() + root_a.square().sum() + root_b.square().sum()
    return max(0.0, float(squares - 2 * overlap))


def _gaussian(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean and a root R of the covariance, Rᵀ R = Σ."""
    rows = rows.detach().double().cpu()
    mean = rows.mean(0)
    return mean, torch.linalg.qr(rows - mean, mode="r").R / math.sqrt(len(rows) - 1)
