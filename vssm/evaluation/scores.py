"""Measures a run folder: how likely its test set is, and how well and fast the model generates.

With q̄ the aggregate posterior, the mean of q(z_{t,i}|x) over the sequences, three metrics say how
the latent components (t, i) are used:

    active_components   how many have a mean KL(q || p) above 0.01 nats
    code_perplexity     exp H(q̄), averaged over the components: N when all classes are used equally
    aggregate_kl        KL(q̄ || uniform), summed over the components: how far q̄ is from the prior

Legend: x (B, T, D) or tokens (B, T); K `num_samples`; C `prompt_length`, `cut`.
"""

import inspect
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vssm.checks import (
    check_choice,
    check_flag,
    check_path,
    check_type,
    choose_device,
    shown,
    whole_number,
)
from vssm.data import Data, Meta, open_data
from vssm.data.dataset import is_grey
from vssm.data.storage import why_read_only
from vssm.evaluation import parts, quality
from vssm.evaluation.quality import Progress, Work
from vssm.likelihoods import estimates, reconstruct
from vssm.models import AnyPart, Autoregressive, Ladder, Model, Variational
from vssm.objectives import real_steps
from vssm.objectives.masks import parse_mask
from vssm.ops import choose_backend
from vssm.runs.checkpoint import load
from vssm.runs.config import SavedConfig
from vssm.runs.results import result, write_result

__all__ = ["ACTIVE", "UnwrittenResult", "evaluate_run", "likelihoods", "reconstruction"]

_SEED = 0  # of all draws; the number of a sequence, not its batch, decides which draws it gets
ACTIVE = 0.01
"""Nats of KL above which a latent component counts as active."""


class UnwrittenResult(OSError):
    """Raised when a result could not be written; it took long to measure, so `result` has it."""

    def __init__(self, error: OSError, result: dict[str, Any]) -> None:
        super().__init__(error.errno, error.strerror or str(error), error.filename)
        self.result = result


@torch.no_grad()
def evaluate_run(
    folder: str | Path,
    *,
    num_samples: int = 100,
    max_sequences: int | None = None,
    num_images: int = 10_000,
    batch: int | None = None,
    data_dir: str | Path | None = None,
    device: torch.device | str = "auto",
    splits: str = "test",
    quick: bool = False,
    dials: bool = False,
    particles: bool = False,
    known: str | tuple[str, ...] = (),
    passes: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures the best weights of a run and writes `eval.json` (`eval_valid.json`) to its folder.

    Arguments:
        folder: The run folder, with `config.json` and `weights.safetensors`.
        num_samples: K, the latent draws of every likelihood estimate.
        max_sequences: Score only so many sequences, spread evenly over the split.
        num_images: Samples for every Fréchet distance, at most as many as the split has; 0 for no
            distances.
        batch: Sequences of a pass; by default what suits the device and the length.
        data_dir: Where the data files are, if not where they were in training.
        device: "auto" takes a GPU when there is one.
        splits: "test", or "valid" to look while the test set stays closed.
        quick: At most 64 sequences, 10 draws and 256 images.
        dials: Whether to measure quality against time for vssm and tvae: Fréchet distances and
            times over chunk sizes W and passes S (see `vssm.evaluation.quality`); only times if the
            data are not images.
        particles: Whether to estimate likelihoods by a particle filter as well (`..._particles`),
            for vssm and tvae without levels and vrnn: closer to log p(x) with as many draws, and
            slower.
        known: For models with known="any": what is known of the sequences, "prefix", "random:P",
            "block:N" or "hole:N". Each adds the nats of the unknown entries, and how good samples
            of them are (see `vssm.evaluation.parts`).
        passes: The passes in which these entries are made.
        progress: Called with (stage, done, total).

    Returns:
        The result as written: `name`, `date`, `commit`, `machine`, `command`, `config`, `metrics`.
    """
    check_path("folder", folder)
    if data_dir is not None:
        check_path("data_dir", data_dir)
        data_dir = str(data_dir)
    known = (known,) if isinstance(known, str) else known
    check_type("known", known, (tuple, list), "names such as random:0.5")
    for name in known:
        parse_mask(name)
    if progress is not None and not callable(progress):
        raise ValueError(f"progress is {shown(progress)}; it must be a function")
    check_choice("splits", splits, ("test", "valid"))
    for name, flag in (("quick", quick), ("dials", dials), ("particles", particles)):
        check_flag(name, flag)
    num_samples = whole_number("num_samples", num_samples, 1)
    num_images = whole_number("num_images", num_images, 0)
    passes = whole_number("passes", passes, 1)
    if num_images == 1:
        raise ValueError("num_images=1 gives no distance; use 0 for none, or 2 and more")
    if max_sequences is not None:
        max_sequences = whole_number("max_sequences", max_sequences, 1)
    if batch is not None:
        batch = whole_number("batch", batch, 1)
    given: dict[str, Any] = {name: value for name, value in locals().items() if name in _DEFAULTS}
    given |= {"device": str(device), "known": list(known)}
    if quick:
        num_samples, num_images = min(num_samples, 10), min(num_images, 256)
        max_sequences = min(max_sequences or 64, 64)

    folder, device = Path(folder), choose_device(str(device))
    model = load(folder, device).eval().requires_grad_(False)
    _check_asked(model, dials, particles, known)
    if why := why_read_only(folder):
        raise ValueError(
            f"folder={str(folder)!r} cannot be written to ({why}); use a run folder of yours, or a "
            "copy"
        )
    config, data = _open_run(folder, model, data_dir)
    for name in known:
        parts.known_entries(data.meta, name, torch.zeros(1, dtype=torch.int64))  # raises if unknown
    split = data.test() if splits == "test" else data.valid
    path = folder / ("eval.json" if splits == "test" else "eval_valid.json")
    work = Work(model, data, split, batch, device, progress)
    metrics = _scores(work, num_samples, max_sequences, particles)
    index = quality.spread(len(split), max_sequences)
    for name in known:
        metrics |= parts.fill_scores(work, index, name, passes, num_samples)
    any_part = isinstance(model, AnyPart)
    calls = parts.fill_calls if any_part else quality.generation_calls
    metrics |= quality.measure_times(work, calls(work, dials), repeats=5 if quick else 21)
    labelled = data.meta.image_shape is not None and data.train.labels is not None
    if num_images and labelled and not model.head.tokens:
        if any_part:
            ways = parts.fill_makers(work, num_images, dials, known, passes)
        else:
            ways = quality.image_makers(work, num_images, dials)
        metrics |= quality.image_quality(work, num_images, ways)
    mamba = model.config.block == "mamba"
    backend = choose_backend("auto", device, torch.float32) if mamba else None
    settings = {**config, "evaluate": {**given, "device": device.type, "backend": backend}}
    made = result(folder.resolve().name, _command(folder, given), settings, metrics)
    try:
        write_result(path, made)
    except OSError as error:
        raise UnwrittenResult(error, made) from None
    return made


_DEFAULTS = {
    name: option.default
    for name, option in inspect.signature(evaluate_run).parameters.items()
    if name not in ("folder", "progress")
}


def _check_asked(model: Model, dials: bool, particles: bool, known: tuple[str, ...]) -> None:
    """Raises if something is to be measured that the model does not have."""
    if dials and not quality.dials(model):
        raise ValueError(
            "dials=True is for models that generate in parallel, not "
            f"kind={model.config.kind!r}; use it with vssm or tvae"
        )
    if known and not isinstance(model, AnyPart):
        raise ValueError(
            f"known={' '.join(known)} is for models with known='any'; train with --model.known any"
        )
    if particles and isinstance(model, Autoregressive | Ladder | AnyPart):
        raise ValueError(
            f"particles=True is not for kind={model.config.kind!r} with "
            f"levels={model.config.levels}; use it with vssm and tvae without levels, or vrnn"
        )


def _scores(
    work: Work, num_samples: int, max_sequences: int | None, particles: bool
) -> dict[str, float]:
    """Measures the ELBO and the likelihoods."""
    model, index = work.model, quality.spread(len(work.split), max_sequences)
    parallel = isinstance(model, Variational | Ladder | AnyPart)
    metrics: dict[str, float] = {
        "sequences": len(index),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "prompt_length": work.cut,
        "passes": model.config.levels if parallel else work.length,  # rounds of draws in a sample
    }
    if not isinstance(model, Autoregressive):
        metrics["num_samples"] = num_samples
    metrics |= reconstruction(work, index)
    metrics |= likelihoods(work, index, num_samples)
    if particles:
        found = likelihoods(work, index, num_samples, "particles")
        metrics |= {f"{n}_particles": nats for n, nats in found.items() if "log_likelihood" in n}
    if model.config.head == "bernoulli" and is_grey(work.split):  # a cross-entropy, no likelihood
        metrics.pop("nats", None)
        named = ((name, "log_likelihood" in name or name == "elbo") for name in metrics)
        metrics = {f"pseudo_{name}" if odd else name: metrics[name] for name, odd in named}
    return metrics


def reconstruction(work: Work, index: np.ndarray) -> dict[str, float]:
    """Measures the ELBO and its terms, the error of the head's mean, and the use of latents."""
    model = work.model
    sums: dict[str, Tensor] = {}

    def add(name: str, value: Tensor) -> None:
        sums[name] = sums.get(name, 0) + value.double()

    for first, x, lengths in work.batches("reconstruction", index):
        p_x, q_z, p_z = reconstruct(model, x, _SEED, lengths, first)
        if isinstance(model, AnyPart):
            x = model.without_given(x)
        steps = x.new_ones(x.shape[:2]).bool() if lengths is None else real_steps(x, lengths)
        there = steps.view(*steps.shape, *[1] * (x.ndim - 2)) & (x == x)  # NaN is missing
        x, real = torch.where(there, x, 0), steps.float()
        if not model.head.tokens:
            error = torch.where(there, (x - p_x.mean).square(), 0).flatten(1).sum(1)
            add("mse", (error / there.flatten(1).sum(1).clamp(min=1)).sum())
        if q_z is not None and p_z is not None:
            add("reconstruction", torch.where(there, p_x.entry_log_prob(x), 0).sum())
            kl = (q_z.probs * (q_z.log_probs - p_z.log_probs)).sum(-1)
            add("kl", (kl * real[..., None]).sum(0))  # (T, Z)
            add("aggregate", (q_z.probs * real[..., None, None]).sum(0))  # (T, Z, N)
            add("there", real.sum(0))  # (T,)
    means = ("mse", "reconstruction")
    metrics = {name: float(sums[name]) / len(index) for name in means if name in sums}
    if "kl" not in sums:
        return metrics
    there = sums["there"][:, None].expand_as(sums["kl"])
    some = there > 0  # a component is judged by the sequences that have its step
    if isinstance(model, Ladder):
        some = some & model.begins(len(some)).to(some.device)
    aggregate = sums["aggregate"][some] / there[some, None]
    entropy = -torch.special.xlogy(aggregate, aggregate).sum(-1)
    metrics["kl"] = float(sums["kl"].sum()) / len(index)
    metrics["elbo"] = metrics["reconstruction"] - metrics["kl"]
    metrics["components"] = entropy.numel()
    metrics["active_components"] = int((sums["kl"][some] / there[some] > ACTIVE).sum())
    metrics["code_perplexity"] = float(entropy.exp().mean())
    if isinstance(model, Variational):  # the prior of a vrnn is not uniform
        metrics["aggregate_kl"] = float((math.log(model.config.classes) - entropy).sum())
    return metrics


def likelihoods(
    work: Work, index: np.ndarray, num_samples: int, method: str = "importance"
) -> dict[str, float]:
    """Measures log p(x) under either prior, where there are two, and log p(x_{C+1:T} | x_{1:C})."""
    model = work.model
    cases = {"log_likelihood": (0, "uniform")}
    if isinstance(model, Variational):
        cases["log_likelihood_empty_prior"] = (0, "partial")
    if work.cut:
        cases["partial_log_likelihood"] = (work.cut, "partial")
    stage, rows = "likelihoods", work.batch
    if method == "particles":
        stage = "likelihoods by particles"
        rows *= 8 if work.device.type == "cuda" else 1  # single steps need many rows on a GPU
    totals, nums = dict.fromkeys(cases, 0.0), dict.fromkeys(cases, 0)
    for first, x, lengths in work.batches(stage, index):
        if not isinstance(model, AnyPart):  # it validates x itself, without missing values
            model.head.validate(x)
        real = None if lengths is None else real_steps(x, lengths)
        wanted = list(cases.values())
        found = estimates(model, x, num_samples, wanted, _SEED, rows, real, method, first)
        for (name, (cut, _)), nats in zip(cases.items(), found, strict=True):
            scored = nats if lengths is None else nats[lengths > cut]  # something follows the cut
            totals[name] += float(scored.double().sum())
            nums[name] += len(scored)
    metrics = {name: total / nums[name] for name, total in totals.items() if nums[name]}
    lengths = work.split.real(index)
    steps = work.length if lengths is None else float(lengths.double().mean())
    bits = -metrics["log_likelihood"] / math.log(2) / steps
    if model.config.head == "categorical":
        metrics["bits_per_char"] = bits
    elif model.config.head == "logistic-mixture":
        metrics["bits_per_dim"] = bits / model.head.features
    elif model.config.head == "bernoulli":
        metrics["nats"] = -metrics["log_likelihood"]
    return metrics


def _open_run(
    folder: Path, model: Model, data_dir: str | Path | None
) -> tuple[dict[str, Any], Data]:
    """Returns the config of a run as it was saved, and its data, which must fit the model."""
    saved = SavedConfig.read(folder)
    config = saved.run().data
    config = config if data_dir is None else replace(config, dir=str(data_dir))
    data = open_data(config, missing=model.config.known == "any")
    kinds = {True: "tokens", False: "numbers"}
    tokens = data.meta.suggested_head == "categorical"
    if (data.meta.features, tokens) != (model.config.features, model.head.tokens):
        raise ValueError(
            f"data {data.meta.name!r} has {data.meta.features} features ({kinds[tokens]}), but the "
            f"model in {str(folder)!r} has {model.config.features} ({kinds[model.head.tokens]}); "
            "use the data that it was trained on"
        )
    meta = saved.values.get("data_meta")
    for name in [] if meta is None else Meta.from_json(meta).differing(data.meta):
        raise ValueError(
            f"data {data.meta.name!r} has another {name} than the run in {str(folder)!r} was "
            "trained with; use the data that it was trained on, without rows that came later"
        )
    return {name: saved.values[name] for name in ("model", "data", "train")}, data


def _command(folder: Path, given: dict[str, Any]) -> str:
    """Returns the command line that repeats an evaluation, options at their defaults left out."""
    words = ["vssm", "evaluate", folder.resolve().name]
    for name, value in given.items():
        if value != _DEFAULTS[name] and value != []:
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else map(str, value if name == "known" else [value])
    return shlex.join(words)
