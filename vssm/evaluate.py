"""How good a model is: how likely data is under it, and how well and how fast it generates.

    autoregressive   log p(x_{C+1:T} | x_{1:C}), exact
    vssm, tvae       log 1/K sum_k p(x|z^k) p(z^k) / q_psi(z^k|x)                        C = 0
                     log 1/K sum_k p(x_{C+1:T}|z^k) q_omega(z^k|x_{1:C}) / q_psi(z^k|x)    C > 0
    vrnn             log 1/K sum_k w_k(1:T) - log 1/K sum_k w_k(1:C),   w_k = p(x|z) p(z) / q(z|x)

with z^k drawn from the posterior (importance sampling; Burda et al., 2016). In expectation the
estimates for C = 0 are lower bounds that tighten with K. The sum over k is streamed: memory does
not grow with K.

`evaluate_run` measures a run folder on its test set. Of the latent components (t, i) it says how they are
used, with q̄ the aggregate posterior, which is the mean of q(z_{t,i}|x) over the sequences:

    active_components   how many have a mean KL(q || p) above 0.01 nats
    code_perplexity     exp H(q̄), averaged over the components: N when all classes are used equally
    aggregate_kl        KL(q̄ || uniform), summed over the components: how far q̄ is from the prior

Legend: x (B, T, D) or tokens (B, T); K `num_samples`; C `prompt_length`, `cut`; W `chunk`.
"""

import inspect
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vssm import noise
from vssm.checkpoint import load
from vssm.config import RunConfig, check_choice
from vssm.data import Data, Split, open_data
from vssm.distributions import Latents, Observation
from vssm.frechet import features, frechet_distance, train_classifier
from vssm.generate import generate
from vssm.models import VRNN, Autoregressive, Model, Variational
from vssm.objectives import real_steps
from vssm.ops import choose_backend
from vssm.results import result, write_result

__all__ = ["evaluate_run", "log_likelihood"]

_ROWS_PER_PASS = 512  # draws of several k share a pass while the batch is small
_ACTIVE = 0.01  # nats

Progress = Callable[[str, int, int], None]
"""Called with the stage, how much of it is done, and how much there is."""


@torch.no_grad()
def log_likelihood(
    model: Model,
    x: Tensor,
    num_samples: int = 100,
    prompt_length: int = 0,
    prior: str = "uniform",
    seed: int = 0,
    lengths: Tensor | None = None,
) -> Tensor:
    """Estimates log p(x_{C+1:T} | x_{1:C}) for every sequence.

    Arguments:
        model: Any of the six models.
        x: The sequences, (B, T, D), or (B, T) tokens.
        num_samples: K, the number of latent draws; an autoregressive model needs none.
        prompt_length: C, the number of steps that are given.
        prior: For vssm and tvae at C = 0: "uniform", or "partial" for q_omega(z | ∅), the prior that
            unconditional generation draws from. With C > 0 it is always q_omega(z | x_{1:C}).
        seed: Names the draws: equal seeds give equal estimates, however the batch is split.
        lengths: The steps of each row that are real, (B,), where the rest is padding.

    Returns:
        Nats, (B,).

    Example:
        >>> from vssm import ModelConfig, build
        >>> model = build(ModelConfig(kind="ssm", features=3, width=8, layers=1))
        >>> log_likelihood(model, torch.zeros(2, 6, 3), prompt_length=3).shape
        torch.Size([2])
    """
    model.head.validate(x)
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples} is not allowed; allowed: a whole number >= 1")
    if not 0 <= prompt_length <= x.shape[1]:
        raise ValueError(f"prompt_length={prompt_length} is not allowed; allowed: 0 to {x.shape[1]}")
    check_choice("prior", prior, ("uniform", "partial"))
    real = None if lengths is None else real_steps(x, lengths)
    if lengths is not None and (lengths < prompt_length).any():
        raise ValueError(
            f"prompt_length={prompt_length} is not allowed; allowed: 0 to {int(lengths.min())}, in lengths"
        )
    return _estimates(model, x, num_samples, [(prompt_length, prior)], seed, _ROWS_PER_PASS, real)[0]


def _estimates(
    model: Model,
    x: Tensor,
    num_samples: int,
    cases: list[tuple[int, str]],
    seed: int,
    rows: int,
    real: Tensor | None = None,
) -> list[Tensor]:
    """Returns one estimate, (B,), for each case (prompt length, prior), all from the same draws.

    Arguments:
        model: Any of the six models.
        x: The sequences.
        num_samples: K.
        cases: Prompt lengths and priors.
        seed: Names the draws.
        rows: Sequences of a pass.
        real: Which steps count, (B, T); all by default.
    """
    mask = torch.ones(x.shape[:2], device=x.device) if real is None else real.float()
    if isinstance(model, Autoregressive):
        p_x, _ = model(x)
        log_p_x = p_x.log_prob(x) * mask
        return [log_p_x[:, cut:].sum(1) for cut, _ in cases]

    totals: list[Tensor] = []
    weights_of = _vrnn_weights if isinstance(model, VRNN) else _variational_weights
    weigh = weights_of(model, x, cases, mask)  # pyright: ignore[reportArgumentType]
    step = max(1, rows // max(1, len(x)))
    for first in range(0, num_samples, step):
        u = _draws(model, x, seed, range(first, min(first + step, num_samples)))
        parts = [torch.logsumexp(weights, 0) for weights in weigh(u)]
        totals = [torch.logaddexp(a, b) for a, b in zip(totals, parts, strict=True)] if totals else parts
    estimates = [total - math.log(num_samples) for total in totals]
    if isinstance(model, VRNN):
        whole, *prompts = estimates
        return [whole - prompt for prompt in prompts]
    return estimates


def _draws(model: Variational | VRNN, x: Tensor, seed: int, draws: range) -> Tensor:
    """Returns the uniform numbers of some draws, (K, B, T, Z)."""
    rows = torch.arange(len(x), device=x.device)
    seeds = torch.full_like(rows, seed)
    shape = (0, x.shape[1], model.config.latents)
    return torch.stack([noise.uniform(seeds, rows, *shape, stream=noise.LATENT, draw=k) for k in draws])


def _variational_weights(
    model: Variational, x: Tensor, cases: list[tuple[int, str]], mask: Tensor
) -> Callable[[Tensor], list[Tensor]]:
    """Returns a function from uniform numbers (K, B, T, Z) to the log weights (K, B) of each case."""
    q_z, _ = model.posterior(x)
    priors: list[Latents | None] = []
    for cut, prior in cases:
        p_z = None
        if cut or prior == "partial":
            p_z, _ = model.partial_posterior(x[:, :cut] if cut else None, empty=x.shape[1] - cut)
        priors.append(p_z)
    log_uniform = -mask.sum(1) * model.config.latents * math.log(model.config.classes)

    def weigh(u: Tensor) -> list[Tensor]:
        z = q_z.sample(u)
        p_x, _ = model.likelihood(z.flatten(0, 1))
        repeated = x.repeat(len(u), *[1] * (x.ndim - 1))
        log_p_x = p_x.log_prob(repeated).unflatten(0, u.shape[:2]) * mask
        log_q_z = (q_z.log_prob(z) * mask).sum(-1)
        weights = []
        for (cut, _), p_z in zip(cases, priors, strict=True):
            log_p_z = log_uniform if p_z is None else (p_z.log_prob(z) * mask).sum(-1)
            weights.append(log_p_x[..., cut:].sum(-1) + log_p_z - log_q_z)
        return weights

    return weigh


def _vrnn_weights(
    model: VRNN, x: Tensor, cases: list[tuple[int, str]], mask: Tensor
) -> Callable[[Tensor], list[Tensor]]:
    """Returns a function from uniform numbers (K, B, T, Z) to log weights of x_{1:T} and of each x_{1:C}."""

    def weigh(u: Tensor) -> list[Tensor]:
        repeated = x.repeat(len(u), *[1] * (x.ndim - 1))
        flat = u.flatten(0, 1)
        path = model(repeated, draw=lambda t, q_z: q_z.sample(flat[:, t : t + 1]))
        steps = path.p_x.log_prob(repeated) + path.p_z.log_prob(path.z) - path.q_z.log_prob(path.z)
        steps = steps.unflatten(0, u.shape[:2]) * mask
        return [steps.sum(-1), *(steps[..., :cut].sum(-1) for cut, _ in cases)]

    return weigh


@torch.no_grad()
def evaluate_run(
    folder: str | Path,
    *,
    num_samples: int = 100,
    max_sequences: int | None = None,
    num_images: int = 10_000,
    batch: int | None = None,
    device: torch.device | str = "auto",
    splits: str = "test",
    quick: bool = False,
    classifier: str | Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures the best weights of a run and writes `eval.json` (`eval_valid.json`) to its folder.

    Arguments:
        folder: The run folder: `config.json` with `model` and `data`, and `weights.safetensors`.
        num_samples: K, the latent draws of every likelihood estimate.
        max_sequences: Score only so many sequences, spread evenly over the split.
        num_images: Samples for every Fréchet distance, at most as many as the split has.
        batch: Sequences of a pass; by default what suits the device and the length.
        device: "auto" takes a GPU when there is one.
        splits: "test", or "valid" to look while the test set stays closed.
        quick: At most 64 sequences, 10 draws and 256 images.
        classifier: A safetensors file for the classifier behind the Fréchet distances, read when it
            exists, else written. Without it the classifier is trained each time.
        progress: Called with (stage, done, total).

    Returns:
        The result as written: `name`, `date`, `commit`, `machine`, `command`, `config` and `metrics`.
    """
    given = {
        "num_samples": num_samples,
        "max_sequences": max_sequences,
        "num_images": num_images,
        "batch": batch,
        "device": str(device),
        "splits": splits,
        "quick": quick,
    }
    for name in ("num_samples", "max_sequences", "num_images", "batch"):
        if given[name] is not None and given[name] < (2 if name == "num_images" else 1):
            least = 2 if name == "num_images" else 1
            raise ValueError(f"{name}={given[name]} is not allowed; allowed: a whole number >= {least}")
    check_choice("splits", splits, ("test", "valid"))
    if quick:
        num_samples, num_images = min(num_samples, 10), min(num_images, 256)
        max_sequences = min(max_sequences or 64, 64)

    folder, device = Path(folder), _choose_device(str(device))
    model = load(folder, device).eval().requires_grad_(False)
    config, data = _open_run(folder, model)
    split = data.test() if splits == "test" else data.valid
    work = _Work(model, data, split, batch, device, progress)
    index = _spread(len(split), max_sequences)
    metrics: dict[str, float] = {
        "sequences": len(index),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "prompt_length": work.cut,
    }
    if not isinstance(model, Autoregressive):
        metrics["num_samples"] = num_samples
    metrics |= _reconstruction(work, index)
    metrics |= _likelihoods(work, index, num_samples)
    metrics |= _generation_times(work, repeats=5 if quick else 21)
    if data.meta.image_shape is not None and data.train.labels is not None and not model.head.tokens:
        metrics |= _image_quality(work, num_images, classifier)

    settings = {**given, "device": device.type, "backend": None}
    if model.config.block == "mamba":
        settings["backend"] = choose_backend("auto", device, torch.float32)
    made = result(folder.resolve().name, _command(folder, given), {**config, "evaluate": settings}, metrics)
    write_result(folder / ("eval.json" if splits == "test" else "eval_valid.json"), made)
    return made


class _Work:
    """What is measured, on what, and how it is cut into passes."""

    def __init__(
        self,
        model: Model,
        data: Data,
        split: Split,
        batch: int | None,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self.model, self.data, self.split, self.device = model, data, split, device
        self.length = data.meta.length
        self.cut = self.length // 2
        steps = 2**15 if device.type == "cuda" else 2**13
        self.batch = batch or max(1, min(1024, steps // self.length))
        self.progress: Progress = progress or (lambda stage, done, total: None)

    def ranges(self, stage: str, num: int) -> Iterator[range]:
        """Yields the ranges of a batch each that make up `num`, and tells how far it is."""
        for first in range(0, num, self.batch):
            self.progress(stage, first, num)
            yield range(first, min(first + self.batch, num))
        self.progress(stage, num, num)

    def batches(self, stage: str, index: np.ndarray) -> Iterator[tuple[int, Tensor]]:
        """Yields the sequences at `index`, each batch with the position of its first."""
        for rows in self.ranges(stage, len(index)):
            yield rows.start, self.split.batch(index[rows.start : rows.stop], self.device)


def _reconstruction(work: _Work, index: np.ndarray) -> dict[str, float]:
    """Measures the ELBO and its terms, the error of the head's mean, and how the latents are used."""
    model = work.model
    sums: dict[str, Tensor] = {}

    def add(name: str, value: Tensor) -> None:
        sums[name] = sums.get(name, 0) + value.double()

    for first, x in work.batches("reconstruction", index):
        p_x, q_z, p_z = _reconstruct(model, x, seed=first)
        if not model.head.tokens:
            add("mse", (x - p_x.mean).square().mean((1, 2)).sum())
        if q_z is not None and p_z is not None:
            add("reconstruction", p_x.log_prob(x).sum())
            add("kl", (q_z.probs * (q_z.log_probs - p_z.log_probs)).sum((0, -1)))  # (T, Z)
            add("aggregate", q_z.probs.sum(0))  # (T, Z, N)
    means = {name: total / len(index) for name, total in sums.items()}
    metrics = {name: float(means[name]) for name in ("mse", "reconstruction") if name in means}
    if "kl" not in means:
        return metrics
    entropy = -torch.special.xlogy(means["aggregate"], means["aggregate"]).sum(-1)
    metrics["kl"] = float(means["kl"].sum())
    metrics["elbo"] = metrics["reconstruction"] - metrics["kl"]
    metrics["components"] = means["kl"].numel()
    metrics["active_components"] = int((means["kl"] > _ACTIVE).sum())
    metrics["code_perplexity"] = float(entropy.exp().mean())
    if isinstance(model, Variational):  # the prior of a vrnn is not uniform
        metrics["aggregate_kl"] = float((math.log(model.config.classes) - entropy).sum())
    return metrics


def _reconstruct(model: Model, x: Tensor, seed: int) -> tuple[Observation, Latents | None, Latents | None]:
    """Returns p(x|z) for one draw of z, with the posterior and the prior of z; p(x) without latents."""
    if isinstance(model, Autoregressive):
        return model(x)[0], None, None
    u = _draws(model, x, seed, range(1))[0]
    if isinstance(model, VRNN):
        path = model(x, draw=lambda t, q_z: q_z.sample(u[:, t : t + 1]))
        return path.p_x, path.q_z, path.p_z
    q_z, _ = model.posterior(x)
    return model.likelihood(q_z.sample(u))[0], q_z, Latents(q_z.logits.new_zeros(q_z.logits.shape[-1:]))


def _likelihoods(work: _Work, index: np.ndarray, num_samples: int) -> dict[str, float]:
    """Measures log p(x), under both priors where there are two, and log p(x_{C+1:T} | x_{1:C})."""
    model = work.model
    cases = {"log_likelihood": (0, "uniform")}
    if isinstance(model, Variational):
        cases["log_likelihood_empty_prior"] = (0, "partial")
    if work.cut:
        cases["partial_log_likelihood"] = (work.cut, "partial")
    totals = dict.fromkeys(cases, 0.0)
    for first, x in work.batches("likelihoods", index):
        model.head.validate(x)
        estimates = _estimates(model, x, num_samples, list(cases.values()), first, work.batch)
        for name, nats in zip(cases, estimates, strict=True):
            totals[name] += float(nats.double().sum())
    metrics = {name: total / len(index) for name, total in totals.items()}
    bits = -metrics["log_likelihood"] / math.log(2) / work.length
    if model.config.head == "categorical":
        metrics["bits_per_char"] = bits
    elif model.config.head == "logistic-mixture":
        metrics["bits_per_dim"] = bits / model.config.features
    elif model.config.head == "bernoulli":
        metrics["nats"] = -metrics["log_likelihood"]
    return metrics


def _generation_times(work: _Work, repeats: int) -> dict[str, float]:
    """Measures the milliseconds of one sequence and of sixteen: in one go, in chunks, resumed, prompted.

    Resumed and prompted make the second half only. `timing_spread` is the largest of the quartile ratios:
    far above 1 it says that the machine was busy with something else, and that the times mean little.
    """
    model, length, cut = work.model, work.length, work.cut
    prompts = work.split.batch(np.arange(16) % len(work.split), work.device)[:, :cut]
    metrics: dict[str, float] = {}
    for stage, num in enumerate((1, 16)):
        work.progress("generation times", stage, 2)
        ways: dict[str, dict[str, Any]] = {"generate": {"num": num, "length": length}}
        if isinstance(model, Variational):
            ways["chunks"] = {"num": num, "length": length, "chunk": max(1, length // 4)}
        if cut:
            state = generate(model, num=num, length=cut).state
            ways["resumed"] = {"length": length - cut, "state": state}
            ways["prompted"] = {"length": length - cut, "prompt": prompts[:num]}
        for name, options in ways.items():
            call = partial(generate, model, **options)
            milliseconds, spread = _milliseconds(call, work.device, repeats)
            metrics[f"{name}_ms_b{num}"] = milliseconds
            metrics["timing_spread"] = max(spread, metrics.get("timing_spread", 1.0))
    work.progress("generation times", 2, 2)
    return metrics


def _milliseconds(call: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, float]:
    """Returns the median time of a call after a warm-up, and the third quartile over the first."""

    def timed() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1000 * (time.perf_counter() - start)

    timed()
    times: list[float] = []
    while len(times) < 5 or (len(times) < repeats and sum(times) < 500):
        times.append(timed())
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return median, high / low


def _image_quality(work: _Work, num_images: int, path: str | Path | None) -> dict[str, float]:
    """Measures Fréchet distances between the split and samples, completions and training images."""
    model, length, cut, split = work.model, work.length, work.cut, work.split
    train, to_image = work.data.train, work.data.meta.to_image
    assert train.labels is not None
    assert split.labels is not None
    classifier = train_classifier(
        to_image(train.batch(slice(None))),
        train.labels,
        int(train.labels.max()) + 1,
        work.device,
        lambda done, total: work.progress("classifier", done, total),
        path,
    )
    num = min(num_images, len(split))
    real = to_image(split.batch(slice(None)))
    reference = features(classifier, real)
    hits = classifier.out(reference.to(work.device, torch.float32)).argmax(-1).cpu() == split.labels.cpu()
    floor = features(classifier, to_image(train.batch(_spread(len(train), num))))
    metrics = {
        "num_images": num,
        "classifier_accuracy": float(hits.double().mean()),
        "fd_floor": frechet_distance(floor, reference),
    }
    prompts = split.batch(_spread(len(split), num))[:, :cut]
    for name, options in _ways_to_sample(model, length, cut).items():
        found = []
        for rows in work.ranges(name, num):
            own: dict[str, Any] = {**options, "rows": rows}
            if "prompted" in name:
                own["prompt"] = prompts[rows.start : rows.stop].to(work.device)
            x = generate(model, num=len(rows), **own).x
            found.append(
                features(classifier, to_image(torch.cat([own["prompt"], x], 1) if "prompt" in own else x))
            )
        made = torch.cat(found)
        metrics[name] = frechet_distance(made, reference) if torch.isfinite(made).all() else math.nan
    return metrics


def _ways_to_sample(model: Model, length: int, cut: int) -> dict[str, dict[str, Any]]:
    """Returns the options of `generate` for every Fréchet distance of a model."""
    ways: dict[str, dict[str, Any]]
    rest = {"length": length - cut}
    if isinstance(model, Variational):
        ways = {"fd_one_shot": {"length": length}}
        for chunk in (length // 2, length // 4, length // 7, 1):
            if 0 < chunk < length:
                ways[f"fd_w{chunk}"] = {"length": length, "chunk": chunk, "recondition": True}
        return {**ways, "fd_prompted": rest} if cut else ways
    ways = {f"fd_{observe}": {"length": length, "observe": observe} for observe in ("sample", "mean")}
    if cut:
        ways["fd_prompted"] = {**rest, "observe": "sample"}
        ways["fd_prompted_mean"] = {**rest, "observe": "mean"}
    return ways


def _spread(num: int, limit: int | None) -> np.ndarray:
    """Returns at most `limit` of the indices below `num`, evenly spread and ascending."""
    return np.arange(num) if limit is None or limit >= num else np.arange(limit) * num // limit


def _choose_device(name: str) -> torch.device:
    there = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if name == "auto":
        name = there[:2][-1]
    elif name == "cuda":
        name = "cuda:0"
    if name not in there:
        raise ValueError(f"device={name!r} is not there; allowed: 'auto', {', '.join(map(repr, there))}")
    return torch.device(name)


def _open_run(folder: Path, model: Model) -> tuple[dict[str, Any], Data]:
    """Returns the config of a run as it was saved, and its data, once they fit the model."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if not isinstance(config.get("data"), dict):
        raise ValueError(f"{str(path)!r} has no key 'data'; allowed: a run folder written by vssm train")
    try:
        chosen = RunConfig.from_dict({"data": config["data"]}).data
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from None
    data = open_data(chosen)
    kinds = {True: "tokens", False: "numbers"}
    tokens = data.meta.suggested_head == "categorical"
    if (data.meta.features, tokens) != (model.config.features, model.head.tokens):
        raise ValueError(
            f"data {data.meta.name!r} has {data.meta.features} features ({kinds[tokens]}); allowed: "
            f"{model.config.features} ({kinds[model.head.tokens]}), those of the model in {str(folder)!r}"
        )
    return {name: config[name] for name in ("model", "data", "train") if name in config}, data


def _command(folder: Path, given: dict[str, Any]) -> str:
    """Returns the command line that repeats an evaluation, options at their defaults left out."""
    defaults = {name: p.default for name, p in inspect.signature(evaluate_run).parameters.items()}
    options = [
        f" --{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in given.items()
        if value != defaults[name]
    ]
    return f"vssm evaluate {folder.resolve().name}{''.join(options)}"
