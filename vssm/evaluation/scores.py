"""Measures a run folder: how likely its test set is, and how well and fast the model generates.

With q̄ the aggregate posterior, the mean of q(z_{t,i}|x) over the sequences, three metrics say how
the latent components (t, i) are used:

    active_components   how many have a mean KL(q || p) above 0.01 nats
    code_perplexity     exp H(q̄), averaged over the components: N when all classes are used equally
    aggregate_kl        KL(q̄ || uniform), summed over the components: how far q̄ is from the prior

Legend: x (B, T, D) or tokens (B, T); K `num_samples`; C `prompt_length`, `cut`.
"""

import dataclasses
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from vssm.data import Data, open_data
from vssm.data.dataset import is_grey
from vssm.data.storage import why_read_only
from vssm.evaluation import quality
from vssm.evaluation.parts import known_entries, suffix
from vssm.evaluation.quality import Progress, Work, no_progress
from vssm.forecasting.metrics import crps
from vssm.likelihoods import estimates, log_likelihood, reconstruct
from vssm.models import AnyPart, Autoregressive, Ladder, Model, Variational
from vssm.objectives import real_steps
from vssm.objectives.masks import parse_mask
from vssm.ops import choose_backend
from vssm.runs.checkpoint import load
from vssm.runs.config import SavedConfig
from vssm.runs.results import result, write_result
from vssm.sampling.filling import fill

_SEED = 0  # of all draws; the number of a sequence, not its batch, decides which draws it gets
ACTIVE = 0.01
"""Nats of KL above which a latent component counts as active."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What is measured of a run, and how thoroughly."""

    num_samples: int = 100
    """K, the latent draws of each likelihood estimate."""
    max_sequences: int | None = None
    """Use only this many sequences, spread evenly over the set."""
    num_images: int = 10_000
    """Generated images for each Fréchet distance, at most as many as the set has; 0 for no
    distances."""
    batch: int | None = None
    """Sequences of a pass; by default a number that suits the device and the length."""
    data_dir: str | None = None
    """Folder with the data files, if they are not where they were in training."""
    device: str = "auto"
    """Where to run: auto, cpu or cuda."""
    splits: str = "test"
    """The set to measure on: test, or valid, which leaves the test set closed."""
    quick: bool = False
    """Take at most 64 sequences, 10 draws and 256 images. The classifier for the distances is still
    trained if the data set has none yet."""
    dials: bool = False
    """Measure quality against time as well, over chunk sizes and passes (vssm, tvae); only times if
    the data are not images."""
    particles: bool = False
    """Estimate likelihoods by a particle filter as well: closer, and slower (vssm and tvae without
    levels, vrnn)."""
    known: tuple[str, ...] = ()
    """For models with --model.known any: also measure how well unknown entries are filled, with
    these masks: prefix, random:P (each entry unknown with probability P), block:N or hole:N."""
    passes: int = 1
    """Passes in which these entries are filled."""

    def __post_init__(self) -> None:
        check_choice("splits", self.splits, ("test", "valid"))
        for name in ("dials", "particles", "quick"):
            check_flag(name, getattr(self, name))
        known = (self.known,) if isinstance(self.known, str) else self.known
        check_type("known", known, (tuple, list), "names such as random:0.5")
        for name in known:
            parse_mask(name)
        if self.data_dir is not None:
            check_path("data_dir", self.data_dir)
        plain: dict[str, Any] = {"known": tuple(known), "device": str(self.device)}
        plain["data_dir"] = None if self.data_dir is None else str(self.data_dir)
        least = {"num_samples": 1, "max_sequences": 1, "num_images": 0, "passes": 1, "batch": 1}
        for name, number in least.items():
            if (value := getattr(self, name)) is not None:
                plain[name] = whole_number(name, value, number)
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        if self.num_images == 1:
            raise ValueError("num_images=1 gives no distance; use 0 for none, or 2 or more")

    def limited(self) -> "EvaluateOptions":
        """Returns the options with the limits of `quick`, if that is set."""
        if not self.quick:
            return self
        return replace(
            self,
            num_samples=min(self.num_samples, 10),
            num_images=min(self.num_images, 256),
            max_sequences=min(self.max_sequences or 64, 64),
        )

    def command(self, folder: Path) -> str:
        """Returns the command line of this evaluation, options at their defaults left out."""
        words = ["vssm", "evaluate", folder.resolve().name]
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) != field.default:
                words.append(f"--{field.name.replace('_', '-')}")
                if value is not True:
                    words += map(str, value if isinstance(value, tuple) else [value])
        return shlex.join(words)


class UnwrittenResult(OSError):
    """Raised when a result could not be written; it took long to measure, so `result` has it."""

    def __init__(self, error: OSError, result: dict[str, Any]) -> None:
        super().__init__(error.errno, error.strerror or str(error), error.filename)
        self.result = result


@torch.no_grad()
def evaluate_run(
    folder: str | Path,
    progress: Progress | None = None,
    **options: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """Measures the best weights of a run and writes `eval.json` (`eval_valid.json`) to its folder.

    Arguments:
        folder: The run folder, with `config.json` and `weights.safetensors`.
        progress: Called with (stage, done, total).
        options: As `EvaluateOptions` lists them.

    Returns:
        The result as written: `name`, `date`, `commit`, `machine`, `command`, `config`, `metrics`.
    """
    check_path("folder", folder)
    if progress is not None and not callable(progress):
        raise ValueError(f"progress is {shown(progress)}; it must be a function")
    asked = EvaluateOptions(**options)
    limits, folder, device = asked.limited(), Path(folder), choose_device(asked.device)
    model = load(folder, device).eval().requires_grad_(False)
    _check_asked(model, asked.dials, asked.particles, asked.known)
    if why := why_read_only(folder):
        raise ValueError(
            f"folder={str(folder)!r} cannot be written to ({why}); use a run folder of yours, or a "
            "copy"
        )
    config, data = _open_run(folder, model, asked.data_dir)
    for name in asked.known:
        known_entries(data.meta, name, torch.zeros(1, dtype=torch.int64))  # raises if unknown
    split = data.test() if asked.splits == "test" else data.valid
    path = folder / ("eval.json" if asked.splits == "test" else "eval_valid.json")
    work = Work(model, data, split, device, asked.batch or 0, progress or no_progress)
    index = quality.evenly_spaced(len(split), limits.max_sequences)
    metrics = _scores(work, index, limits.num_samples, asked.particles)
    for name in asked.known:
        metrics |= fill_scores(work, index, name, asked.passes, limits.num_samples)
    calls = quality.generation_calls(work, asked.dials)
    metrics |= quality.measure_times(work, calls, repeats=5 if asked.quick else 21)
    labelled = data.meta.image_shape is not None and data.train.labels is not None
    if limits.num_images and labelled and not model.head.tokens:
        ways = quality.image_ways(work, asked.dials, asked.known, asked.passes)
        metrics |= quality.image_quality(work, limits.num_images, ways)
    mamba = model.config.block == "mamba"
    backend = choose_backend("auto", device, torch.float32) if mamba else None
    given = {**dataclasses.asdict(asked), "device": device.type, "backend": backend}
    settings = {**config, "evaluate": given}
    made = result(folder.resolve().name, asked.command(folder), settings, metrics)
    try:
        write_result(path, made)
    except OSError as error:
        raise UnwrittenResult(error, made) from None
    return made


def _check_asked(model: Model, dials: bool, particles: bool, known: Sequence[str]) -> None:
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


def _scores(work: Work, index: np.ndarray, num_samples: int, particles: bool) -> dict[str, float]:
    """Measures the ELBO and the likelihoods."""
    model = work.model
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


def fill_scores(
    work: Work, index: np.ndarray, known: str, passes: int, num_samples: int
) -> dict[str, float]:
    """Measures how well a model with known="any" fills what is unknown; see `known_entries`.

    The metrics of "random:0.5" end in `random50`, and in `random50_s4` if made in S = 4 passes:

        nats_random50     - log p(x_U | x_K) / |U|         U the unknown entries, K the known ones
        crps_random50     E|X - y| - E|X - X'| / 2, averaged over U     for numbers, not pixels
        rmse_random50     root of the mean of (E X - y)^2 over U        likewise

    Errors of a series are in deviations of its columns; its windows are scaled by known values.
    """
    meta, end = work.data.meta, suffix(known, passes)
    real_valued = meta.image_shape is None and not work.model.head.tokens
    totals = dict.fromkeys(["nats", *(("crps", "rmse") if real_valued else ())], 0.0)
    count = 0
    for rows in work.ranges(end, len(index)):
        own = index[rows.start : rows.stop]
        numbers = torch.arange(rows.start, rows.stop, device=work.device)
        mask = known_entries(meta, known, numbers)
        x, lengths = work.split.batch(own, work.device, mask), work.split.real(own, work.device)
        options = {"rows": rows.start, "lengths": lengths, "known": mask, "passes": passes}
        nats = log_likelihood(work.model, x, num_samples, **options)
        unknown = ~mask if meta.suggested_head == "categorical" else ~mask & ~x.isnan()
        if lengths is not None:
            there = real_steps(x, lengths)
            unknown = unknown & there.view(*there.shape, *[1] * (x.ndim - 2))
        totals["nats"] -= float(nats.double().sum())
        count += int(unknown.sum())
        if real_valued and bool(unknown.any()):
            _, unit = work.split.scale(own, work.device, mask)
            gaps, y = torch.where(mask, x, torch.nan), torch.where(unknown, x, 0) * unit
            options = {"num": num_samples, "passes": passes, "observe": "sample"}
            some = max(1, work.batch // num_samples)  # sequences whose samples are made at once
            for part in torch.arange(len(x), device=work.device).split(some):
                made = fill(work.model, gaps[part], **options, rows=numbers[part])
                made, truth = (made * unit[part, None]).cpu(), y[part].cpu()
                errors = {"crps": crps(made, truth), "rmse": (made.mean(1) - truth).square()}
                for name, error in errors.items():
                    totals[name] += float(error[unknown[part].cpu()].double().sum())
    metrics = {f"{name}_{end}": total / max(1, count) for name, total in totals.items()}
    if real_valued:
        metrics[f"rmse_{end}"] **= 0.5
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
    meta = saved.meta()
    for name in [] if meta is None else meta.differing(data.meta):
        raise ValueError(
            f"data {data.meta.name!r} has another {name} than the run in {str(folder)!r} was "
            "trained with; use the data that it was trained on, without rows that came later"
        )
    return {name: saved.values[name] for name in ("model", "data", "train")}, data
