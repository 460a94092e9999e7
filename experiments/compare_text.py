"""Compares models of text: bits per character, for vssm and tvae also by the chunk size W.

    python experiments/compare_text.py runs/text-vssm runs/text-ssm --chunks 1 8 64

    log p(x)     exact for an autoregressive model, a bound by importance sampling for the others
    log p_W(x) = log E_{q_psi(z|x)} prod_t p(x_t|z_{1:t}) r_t
    r_t        = q_omega(z_t|x_{1:c(t)}) / q_psi(z_t|x_{1:t})

p_W is the model that generates in chunks of W and reads each chunk before the next, as
`recondition=True` does: c(t) = W floor((t - 1) / W) steps are known when z_t is drawn, and W = T is
one shot. It is estimated with K draws, which is a bound as well. A vssm with L levels is called
vssm_lL; its log p(x) is for one shot, and its bits by W are not measured. If several runs have the
same kind, they are named by their folders. Times are for one sequence of T characters.

Legend: x (B, T) tokens; T `length`; W `chunk`; K `num_samples`.
"""

import math
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from vssm import noise
from vssm.checks import whole_number
from vssm.data import Data, Meta, open_data
from vssm.distributions import Latents
from vssm.evaluation.timing import take_times
from vssm.likelihoods import log_likelihood
from vssm.models import Ladder, Model, Variational
from vssm.runs.checkpoint import load
from vssm.runs.config import read_config
from vssm.runs.results import result, write_result
from vssm.sampling.generation import generate

__all__ = ["TextComparison", "chunked_bits", "compare_text", "main"]

_CHARACTERS_PER_PASS = 2**14
_ROWS_PER_PASS = 512  # draws share a pass while the batch is small


@dataclass(frozen=True, kw_only=True)
class TextComparison:
    """How runs are compared."""

    chunks: tuple[int, ...] = (1, 4, 16, 64)
    """The chunk sizes W; one shot is always included. W = 1 takes a pass for each character."""
    num_samples: int = 20
    """K, the latent draws of each estimate."""
    sequences: int = 64
    """Test sequences, spread evenly over the test set."""
    prompt: str = "\n"
    """What the printed samples start with."""
    device: str = "cpu"
    """Where to run."""
    out: Path | None = None
    """Where the result goes, for example results/text/tinyshakespeare.json."""


@torch.no_grad()
def chunked_bits(model: Variational, x: Tensor, chunk: int, num_samples: int = 20) -> float:
    """Returns the bits per character of text that is generated W characters at a time.

    Arguments:
        model: A vssm or tvae of tokens.
        x: Text, (B, T) tokens.
        chunk: W; each chunk is read before the next.
        num_samples: K.

    Example:
        >>> from vssm import ModelConfig, build
        >>> options = {"features": 4, "head": "categorical", "width": 8, "layers": 1}
        >>> model = build(ModelConfig(kind="vssm", latents=2, classes=4, **options))
        >>> bits = chunked_bits(model, torch.zeros(2, 6, dtype=torch.int64), chunk=4, num_samples=3)
        >>> 0 < bits < 8
        True
    """
    q_z, p_z = model.posterior(x)[0], _chunked_prior(model, x, chunk)
    rows = torch.arange(len(x), device=x.device)
    shape = (0, x.shape[1], model.config.latents)
    weights = []
    for draws in torch.arange(num_samples).split(max(1, _ROWS_PER_PASS // len(x))):
        seeds = torch.zeros_like(rows)
        u = [
            noise.uniform(seeds, rows, *shape, stream=noise.LATENT, draw=k) for k in draws.tolist()
        ]
        z = q_z.sample(torch.stack(u))  # (K, B, T, Z)
        p_x, _ = model.likelihood(z.flatten(0, 1))
        log_p_x = p_x.log_prob(x.repeat(len(draws), 1)).unflatten(0, z.shape[:2])
        weights.append((log_p_x + p_z.log_prob(z) - q_z.log_prob(z)).double().sum(-1))
    nats = torch.logsumexp(torch.cat(weights), 0) - math.log(num_samples)
    return float(-nats.mean() / math.log(2) / x.shape[1])


def _chunked_prior(model: Variational, x: Tensor, chunk: int) -> Latents:
    """Returns q_omega(z_t | x_{1:c(t)}) for all steps, c(t) the last multiple of W before t."""
    logits, state = [], None
    for known in range(0, x.shape[1], chunk):
        part = x[:, known : known + chunk]
        ahead, _ = model.partial_posterior(empty=part.shape[1], state=state)
        logits.append(ahead.logits.expand(len(x), -1, -1, -1))
        _, state = model.partial_posterior(part, state=state)
    return Latents(torch.cat(logits, 1))


def compare_text(folders: Sequence[Path], options: TextComparison) -> dict[str, Any]:
    """Measures runs of data set text on their test set, and prints numbers and samples of each.

    Arguments:
        folders: One or more run folders with the same text, unit and length.
        options: How.

    Returns:
        The result, as written to `options.out`, with the `samples`.
    """
    for chunk in options.chunks:
        whole_number("chunks", chunk, 1)
    num_samples = whole_number("num_samples", options.num_samples, 1)
    sequences = whole_number("sequences", options.sequences, 1)
    if not folders:
        raise ValueError("runs is empty; give one or more run folders of data set 'text'")
    folders = [Path(folder) for folder in folders]
    models = [load(folder, options.device).eval() for folder in folders]
    names = _names(folders, models)
    data = _open_text(folders)
    meta, split = data.meta, data.test()
    prompt = meta.encode(options.prompt)[None].to(options.device)
    if not 1 <= prompt.shape[1] < meta.length:
        raise ValueError(
            f"prompt has {prompt.shape[1]} tokens; allowed: 1 to {meta.length - 1},"
            " fewer than a sequence of the runs"
        )
    num = min(sequences, len(split))
    x = split.batch(torch.arange(num) * len(split) // num, options.device)
    parts = x.split(max(1, _CHARACTERS_PER_PASS // meta.length))
    metrics: dict[str, float | None] = {}
    settings: dict[str, Any] = {}
    samples: dict[str, str] = {}
    for name, model in zip(names, models, strict=True):
        nats = torch.cat([log_likelihood(model, part, num_samples) for part in parts])
        numbers = {
            "bits_per_char": float(-nats.double().mean() / math.log(2) / meta.length),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "ms": _milliseconds(model, meta.length, {}),
        }
        ways: dict[str, dict[str, Any]] = {"": {}}
        if isinstance(model, Variational | Ladder):
            shorter = {chunk for chunk in options.chunks if chunk < meta.length}
            ways = {f" W = {meta.length}": {}}
            for chunk in sorted(shorter, reverse=True):
                ways[f" W = {chunk}"] = {"chunk": chunk, "recondition": True}
            for way in ways.values():
                chunk = way.get("chunk", meta.length)
                numbers[f"ms_w{chunk}"] = _milliseconds(model, meta.length, way)
                if isinstance(model, Variational):
                    bits = [len(p) * chunked_bits(model, p, chunk, num_samples) for p in parts]
                    numbers[f"bits_per_char_w{chunk}"] = sum(bits) / num
        metrics |= {f"{name}_{key}": value for key, value in numbers.items()}
        settings[name] = model.config.to_dict()
        print(f"{name}: " + "  ".join(f"{key} {value:.4g}" for key, value in numbers.items()))
        for way, own in ways.items():
            samples[f"{name}{way}"] = _sample(model, meta, options.prompt, prompt, own)
            print(f"--- {name}{way}\n{samples[f'{name}{way}']}")
    command = f"python experiments/compare_text.py {shlex.join(sys.argv[1:])}"
    made = {**result("text", command, settings, metrics), "samples": samples}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_result(options.out, made)
    return made


def _names(folders: list[Path], models: list[Model]) -> list[str]:
    """Returns the kinds of the models, or folder names where several models have the same kind."""
    configs = [model.config for model in models]
    kinds = [c.kind if c.levels == 1 else f"{c.kind}_l{c.levels}" for c in configs]
    names = [
        kind if kinds.count(kind) == 1 else folder.resolve().name
        for kind, folder in zip(kinds, folders, strict=True)
    ]
    twice = [name for name, num in Counter(names).items() if num > 1]
    if twice:
        raise ValueError(
            f"several runs would be called {twice[0]!r}; rename a folder, or give different kinds"
        )
    return names


def _open_text(folders: list[Path]) -> Data:
    """Opens the text of the runs; raises unless all have the same test sequences."""
    first: Data | None = None
    for folder in folders:
        config = read_config(folder).data
        if config.name != "text":
            raise ValueError(f"{str(folder)!r} was trained on {config.name!r}, not on 'text'")
        data = open_data(config)
        first = first or data
        same = (data.meta.vocabulary, data.meta.length) == (
            first.meta.vocabulary,
            first.meta.length,
        )
        if not same or not torch.equal(data.test().x, first.test().x):
            raise ValueError(
                f"runs {str(folders[0])!r} and {str(folder)!r} have different test sequences;"
                " give runs of one text, with the same text.unit and text.length"
            )
    assert first is not None
    return first


def _milliseconds(model: Model, length: int, way: dict[str, Any]) -> float:
    """Returns the median of three calls after a warm-up."""

    def call() -> object:
        return generate(model, num=1, length=length, observe="sample", **way).x.cpu()

    return median(take_times(call, next(model.parameters()).device, repeats=3))


def _sample(model: Model, meta: Meta, text: str, prompt: Tensor, way: dict[str, Any]) -> str:
    length = meta.length - prompt.shape[1]
    made = generate(model, prompt=prompt, length=length, observe="sample", **way).x
    return text + meta.decode(made[0].cpu())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the comparison from the command line; a mistake gives one line and exit code 2."""
    import tyro

    @dataclass(frozen=True, kw_only=True)
    class Arguments(TextComparison):
        runs: tyro.conf.Positional[tuple[Path, ...]]
        """Run folders of data set text."""

    try:
        given = asdict(tyro.cli(Arguments, prog="compare_text.py", args=arguments))
        compare_text(given.pop("runs"), TextComparison(**given))
    except ValueError as error:
        print(f"vssm: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
