"""Compares models of text: bits per character of every model, and of a vssm or tvae by its chunk size W.

    python -m vssm.lab.compare_text runs/text-vssm runs/text-ssm --chunks 1 8 64

    log p(x)      exact for an autoregressive model, by importance sampling for the others: a bound
    log p_W(x)  = log E_{q_psi(z|x)} prod_t p(x_t|z_{1:t}) q_omega(z_t|x_{1:c(t)}) / q_psi(z_t|x_{1:t})

p_W is the model that generates in chunks of W and reads each before the next (`recondition=True`), so that
c(t) = W floor((t - 1) / W) steps are known when z_t is drawn; W = T is one shot. It is estimated with K
draws, a bound as well. A vssm with L levels is named vssm_lL; its log p(x) is that of one shot, and its bits
by W are not measured. Runs of one kind are named as their folders. Times are of one sequence of T characters.

Legend: x (B, T) tokens; T `length`; W `chunk`; K `num_samples`.
"""

import json
import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from vssm import noise
from vssm.checks import whole_number
from vssm.config import RunConfig
from vssm.data import Data, Meta, open_data
from vssm.distributions import Latents
from vssm.likelihoods import log_likelihood
from vssm.models import Ladder, Model, Variational
from vssm.runs.checkpoint import load
from vssm.runs.results import result, write_result
from vssm.sampling.generation import generate

__all__ = ["TextComparison", "chunked_bits", "compare_text", "main"]

_CHARACTERS_PER_PASS = 2**14
_ROWS_PER_PASS = 512  # draws share a pass while the batch is small


@dataclass(frozen=True, kw_only=True)
class TextComparison:
    """Which runs are compared, and how."""

    chunks: tuple[int, ...] = (1, 4, 16, 64)
    """The chunk sizes W; one shot is always there. W = 1 takes as many passes as there are characters."""
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
    """Returns the bits per character of text that is generated W at a time, each chunk read before the next.

    Arguments:
        model: A vssm or tvae of tokens.
        x: Text, (B, T) tokens.
        chunk: W.
        num_samples: K.

    Example:
        >>> from vssm import ModelConfig, build
        >>> options = {"features": 4, "head": "categorical", "width": 8, "layers": 1}
        >>> model = build(ModelConfig(kind="vssm", latents=2, classes=4, **options))
        >>> bits = chunked_bits(model, torch.zeros(2, 6, dtype=torch.int64), chunk=4, num_samples=3)
        >>> 0 < bits < 8
        True
    """
    chunk, num_samples = (
        whole_number("chunk", chunk, 1),
        whole_number("num_samples", num_samples, 1),
    )
    q_z, p_z = model.posterior(x)[0], _chunked_prior(model, x, chunk)
    rows = torch.arange(len(x), device=x.device)
    shape = (0, x.shape[1], model.config.latents)
    weights = []
    together = max(1, _ROWS_PER_PASS // len(x))
    for first in range(0, num_samples, together):
        draws = range(first, min(first + together, num_samples))
        seeds = torch.zeros_like(rows)
        u = [noise.uniform(seeds, rows, *shape, stream=noise.LATENT, draw=draw) for draw in draws]
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
    """Measures runs of data set text on their test set, and prints a table and a sample of each.

    Arguments:
        folders: Run folders, one or more, of one text, unit and length.
        options: How.

    Returns:
        The result, as written to `options.out`, with the `samples`.
    """
    for chunk in options.chunks:
        whole_number("chunks", chunk, 1)
    whole_number("num_samples", options.num_samples, 1)
    sequences = whole_number("sequences", options.sequences, 1)
    if not folders:
        raise ValueError("runs is empty; allowed: one run folder of data set 'text' or more")
    folders = [Path(folder) for folder in folders]
    opened = [_open(folder, options.device) for folder in folders]
    names = _names(folders, [model for model, _ in opened])
    _check_one_text(folders, [data for _, data in opened])
    meta, split = opened[0][1].meta, opened[0][1].test()
    _encode_prompt(meta, options.prompt)
    length, num = meta.length, min(sequences, len(split))
    x = split.batch(torch.arange(num) * len(split) // num, options.device)
    metrics: dict[str, float | None] = {}
    settings: dict[str, Any] = {}
    samples: dict[str, str] = {}
    for name, folder, (model, _) in zip(names, folders, opened, strict=True):
        numbers: dict[str, float] = {"bits_per_char": _bits(model, x, options.num_samples)}
        numbers["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        numbers["ms"] = _milliseconds(model, length, {})
        ways: dict[str, dict[str, Any]] = {"": {}}
        if isinstance(model, Variational | Ladder):
            for chunk in sorted({length, *(c for c in options.chunks if c < length)}, reverse=True):
                own = {"chunk": chunk, "recondition": True} if chunk < length else {}
                if isinstance(model, Variational):
                    numbers[f"bits_per_char_w{chunk}"] = _chunked(
                        model, x, chunk, options.num_samples
                    )
                numbers[f"ms_w{chunk}"] = _milliseconds(model, length, own)
                ways[f" W = {chunk}"] = own
            del ways[""]
        metrics |= {f"{name}_{key}": value for key, value in numbers.items()}
        settings[name] = json.loads((folder / "config.json").read_text())["model"]
        print(f"{name}: " + "  ".join(f"{key} {value:.4g}" for key, value in numbers.items()))
        for way, own in ways.items():
            samples[f"{name}{way}"] = _sample(model, meta, options.prompt, own)
            print(f"--- {name}{way}\n{samples[f'{name}{way}']}")
    made = result(
        "text", f"python -m vssm.lab.compare_text {shlex.join(sys.argv[1:])}", settings, metrics
    )
    made["samples"] = samples
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_result(options.out, made)
    return made


def _open(folder: Path, device: str) -> tuple[Model, Data]:
    model = load(folder, device).eval()
    config = json.loads((folder / "config.json").read_text())
    name = config.get("data", {}).get("name", "unknown data")
    if name != "text":
        raise ValueError(
            f"{str(folder)!r} was trained on {name!r}; allowed: a run of data set 'text'"
        )
    return model, open_data(RunConfig.from_dict({"data": config["data"]}).data)


def _names(folders: list[Path], models: list[Model]) -> list[str]:
    """Returns the kinds of models, and the names of their folders where a kind is there more than once."""
    configs = [model.config for model in models]
    names = [c.kind if c.levels == 1 else f"{c.kind}_l{c.levels}" for c in configs]
    count = Counter(names)
    pairs = zip(names, folders, strict=True)
    names = [name if count[name] == 1 else folder.resolve().name for name, folder in pairs]
    for name, num in Counter(names).items():
        if num > 1:
            given = ", ".join(str(f) for f, own in zip(folders, names, strict=True) if own == name)
            raise ValueError(
                f"runs={given!r} would all be called {name!r}; allowed: runs of different kinds, or of"
                " folders with different names"
            )
    return names


def _check_one_text(folders: list[Path], datas: list[Data]) -> None:
    """Raises unless all runs have the same test sequences: others would be no comparison."""
    first, test = datas[0].meta, datas[0].test()
    for folder, data in zip(folders[1:], datas[1:], strict=True):
        same = (data.meta.vocabulary, data.meta.length) == (first.vocabulary, first.length)
        if not same or not torch.equal(data.test().x, test.x):
            raise ValueError(
                f"runs {str(folders[0])!r} and {str(folder)!r} are of different test sequences; allowed: runs"
                " of one text, with the same text.unit and text.length"
            )


def _encode_prompt(meta: Meta, prompt: str) -> Tensor:
    """Returns the tokens of a prompt, (1, N), that leaves room for a sample."""
    tokens = meta.encode(prompt)[None]
    if not 1 <= tokens.shape[1] < meta.length:
        raise ValueError(
            f"prompt has {tokens.shape[1]} tokens; allowed: 1 to {meta.length - 1}, fewer than a sequence of"
            " the runs"
        )
    return tokens


def _batches(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(max(1, _CHARACTERS_PER_PASS // x.shape[1]))


def _bits(model: Model, x: Tensor, num_samples: int) -> float:
    nats = torch.cat([log_likelihood(model, part, num_samples) for part in _batches(x)])
    return float(-nats.double().mean() / math.log(2) / x.shape[1])


def _chunked(model: Variational, x: Tensor, chunk: int, num_samples: int) -> float:
    parts = _batches(x)
    return sum(chunked_bits(model, part, chunk, num_samples) * len(part) for part in parts) / len(x)


def _milliseconds(model: Model, length: int, ways: dict[str, Any]) -> float:
    times = []
    for _ in range(4):
        began = time.perf_counter()
        generate(model, num=1, length=length, observe="sample", **ways).x.cpu()
        times.append(1000 * (time.perf_counter() - began))
    return median(times[1:])


def _sample(model: Model, meta: Meta, prompt: str, ways: dict[str, Any]) -> str:
    tokens = _encode_prompt(meta, prompt).to(next(model.parameters()).device)
    made = generate(
        model, prompt=tokens, length=meta.length - tokens.shape[1], observe="sample", **ways
    ).x
    return prompt + meta.decode(made[0].cpu())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the comparison that the arguments describe; a mistake gives one line and exit code 2."""
    import tyro

    @dataclass(frozen=True, kw_only=True)
    class Arguments(TextComparison):
        runs: tyro.conf.Positional[tuple[Path, ...]]
        """Run folders of data set text."""

    try:
        given = tyro.cli(Arguments, prog="python -m vssm.lab.compare_text", args=arguments)
        compare_text(given.runs, given)
    except ValueError as error:
        print(f"vssm: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
