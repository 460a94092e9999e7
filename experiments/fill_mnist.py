"""Scores a model that fills any part of MNIST: `python experiments/fill_mnist.py mnist-any-small`.

Measured on test images, with the classifier of `vssm evaluate` (Fréchet distance and labels):

- images of a label from nothing, S passes: distance, share with that label, time;
- a hole of 14 x 14 in the middle, and 75 % of all pixels missing: distance of the filled images,
  squared error of the unknown pixels, beside the median image and linear interpolation of rows;
- nats of the unknown pixels, with one draw of the latents (a bound).

Writes results/fill/mnist.json.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

import vssm
from vssm.data import open_data
from vssm.data.config import DataConfig
from vssm.evaluation.frechet import cached_classifier, features, frechet_distance
from vssm.objectives.masks import named_mask
from vssm.runs.results import result, write_result

BATCH = 500
PASSES = (1, 2, 4, 8, 16, 32, 64)
MASKS = {"hole14": "hole:14", "random75": "random:0.75", "prefix": "prefix"}


def interpolated(x: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Fills each row of pixels by linear interpolation; rows without a known pixel with zero."""
    filled, columns = x.clone(), np.arange(x.shape[2])
    for image, mask in zip(filled.numpy(), known.numpy(), strict=True):
        for row, there in zip(image, mask, strict=True):
            row[~there] = 0
            if there.any():
                row[~there] = np.interp(columns[~there], columns[there], row[there])
    return filled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a shipped model or a run folder, trained with --labels")
    parser.add_argument("--num", type=int, default=1000, help="test images")
    parser.add_argument("--out", default="results/fill/mnist.json")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine = vssm.Engine(vssm.load(options.model).to(device))
    data = open_data(DataConfig(name="mnist", labels=True))
    pixels = engine.config.features - engine.config.given
    test, train = data.test().batch(slice(0, options.num)), data.train
    labels, images = data.test().labels[: options.num], test[..., :pixels]

    def show(step: int, total: int) -> None:
        if step % 100 == 0:
            print(f"classifier: step {step} of {total}", file=sys.stderr)

    x = train.batch(slice(None))[..., :pixels]
    classifier = cached_classifier(x[..., None], train.labels, 10, device, show)

    def seen(images: torch.Tensor) -> torch.Tensor:
        return features(classifier, images[..., None])

    def fill(x: torch.Tensor, **how: int) -> torch.Tensor:
        parts = x.to(device).split(BATCH)
        rows = torch.arange(len(x)).split(BATCH)
        made = [engine.fill(x, rows=r.tolist(), **how) for x, r in zip(parts, rows, strict=True)]
        return torch.cat(made)[..., :pixels].cpu()

    def nats(known: torch.Tensor, passes: int) -> float:
        total = 0.0
        for first in range(0, options.num, BATCH):
            now = slice(first, first + BATCH)
            own = test[now].to(device), known[now].to(device)
            total += float(
                vssm.log_likelihood(
                    engine.model, own[0], num_samples=1, known=own[1], passes=passes, rows=first
                ).sum()
            )
        return total / options.num

    reference = seen(images)
    metrics = {
        "num_images": options.num,
        "classifier_accuracy": accuracy(classifier, reference, labels),
        "fd_floor": frechet_distance(seen(x[:: len(x) // options.num][: options.num]), reference),
    }
    nothing = test.clone()
    nothing[..., :pixels] = torch.nan
    for passes in PASSES:
        made = seen(fill(nothing, passes=passes))
        metrics[f"fd_label_s{passes}"] = frechet_distance(made, reference)
        metrics[f"label_accuracy_s{passes}"] = accuracy(classifier, made, labels)
        metrics[f"vssm_ms_100_s{passes}"] = milliseconds(engine, nothing[:100].to(device), passes)
        print({name: round(value, 3) for name, value in metrics.items()}, flush=True)
    noise = torch.rand(images.shape, generator=torch.Generator().manual_seed(0))
    median = x[::10].median(0).values.expand_as(images)
    for name, mask in MASKS.items():
        known = named_mask(mask, *images.shape[1:], noise)
        everything = torch.nn.functional.pad(known, (0, engine.config.given), value=True)
        given = torch.cat([torch.where(known, images, torch.nan), test[..., pixels:]], -1)
        guesses = {
            "median": torch.where(known, images, median),
            "linear": interpolated(images, known),
        }
        for passes in (1, 4, 16):
            many = fill(given, num=8, passes=passes)
            guesses[f"vssm_s{passes}"] = many[:, 0]
            guesses[f"vssm_mean8_s{passes}"] = many.mean(1)
            metrics[f"vssm_nats_{name}_s{passes}"] = nats(everything, passes)
        for guess, filled in guesses.items():
            metrics[f"{guess}_fd_{name}"] = frechet_distance(seen(filled), reference)
            error = (filled.clamp(0, 1) - images)[~known].square().mean()
            metrics[f"{guess}_mse_{name}"] = float(error)
        print({key: round(value, 3) for key, value in metrics.items() if name in key}, flush=True)
    command = "python " + " ".join(["experiments/fill_mnist.py", *sys.argv[1:]])
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    config = {"model": options.model, "num": options.num}
    write_result(options.out, result("fill_mnist", command, config, metrics))


def accuracy(classifier: torch.nn.Module, seen: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the share of images that the classifier gives their label."""
    guesses = classifier.out(seen.to(classifier.out.weight)).argmax(-1).cpu()
    return float((guesses == labels).double().mean())


def milliseconds(engine: vssm.Engine, x: torch.Tensor, passes: int, repeats: int = 5) -> float:
    """Returns the median time of filling a batch."""
    times = []
    for seed in range(repeats + 1):
        start = time.perf_counter()
        engine.fill(x, passes=passes, seed=seed)
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
