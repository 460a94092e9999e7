"""Scores text by the number of parallel passes S, beside models that write step by step.

    python experiments/text_passes.py runs/any --baselines runs/ssm runs/rnn --judge runs/ssm

Of each run with known="any", for S = 1, 2, 4 ... 64, and of each baseline:

    bits     a character of test text; exact for baselines, a bound for passes (--num-samples draws)
    judge    bits a character of samples, under the judge, a model that writes step by step
    entropy  of the words of all samples, in bits; samples that repeat themselves have little
    words    share of the words of samples that stand in the training text
    ms       for one sequence

The same of real text stands beside them. Writes results/text/NAME_passes.json.
"""

import argparse
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import vssm
from vssm.data import open_data
from vssm.models import AnyPart
from vssm.runs.config import read_config
from vssm.runs.results import result, write_result

PASSES = (1, 2, 4, 8, 16, 32, 64)
BATCH = 64


def bits(model: torch.nn.Module, x: Tensor, passes: int = 1, num_samples: int = 1) -> float:
    """Returns bits a character of texts (B, T)."""
    total = 0.0
    for first in range(0, len(x), BATCH):
        options = {"passes": passes, "num_samples": num_samples, "rows": first}
        nats = vssm.log_likelihood(model, x[first : first + BATCH], **options)
        total -= float(nats.double().sum())
    return total / x.numel() / math.log(2)


def word_scores(texts: list[str], vocabulary: set[str]) -> tuple[float, float]:
    """Returns the entropy of the words of texts in bits, and the share of them that are known.

    The first and the last word of a text may be cut and do not count.

    >>> word_scores(["x to be or not to y"], {"to", "be", "or"})
    (1.9219280948873623, 0.8)
    """
    words = Counter(word for text in texts for word in text.split()[1:-1])
    total = sum(words.values())
    shares = [count / total for count in words.values()]
    known = sum(count for word, count in words.items() if word in vocabulary) / total
    return -sum(share * math.log2(share) for share in shares), known


def milliseconds(call: Callable[[int], object], repeats: int = 9) -> float:
    """Returns the median time of a call with seeds that change."""
    times = []
    for seed in range(repeats + 2):
        start = time.perf_counter()
        call(seed)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def from_nothing(engine: vssm.Engine, length: int, passes: int, num: int, seed: int) -> Tensor:
    """Returns texts (num, length) that are written in S passes."""
    x = torch.zeros(num, length, dtype=torch.int64, device=engine.device)
    return engine.fill(x, torch.zeros_like(x).bool(), passes=passes, observe="sample", seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", help='run folders of models with known="any"')
    parser.add_argument("--baselines", nargs="*", default=[], help="runs that write step by step")
    parser.add_argument("--judge", required=True, help="a run that writes step by step")
    parser.add_argument("--part", choices=("validation", "test"), default="test")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--num-samples", type=int, default=8, help="draws of a bound")
    parser.add_argument("--name", default="text")
    parser.add_argument("--out", default="results/text")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = open_data(read_config(options.judge).data)
    letters = data.meta.vocabulary
    assert letters is not None
    split = data.test() if options.part == "test" else data.valid
    spread = torch.linspace(0, len(split) - 1, min(options.sequences, len(split))).long()
    x = split.batch(spread.numpy()).to(device).long()
    num, length = x.shape

    def to_texts(tokens: Tensor) -> list[str]:
        return ["".join(letters[token] for token in row) for row in tokens.tolist()]

    vocabulary = set("".join(to_texts(data.train.batch(slice(None)))).split())
    judge = vssm.load(options.judge).to(device)
    metrics: dict[str, float] = {"sequences": num, "length": length}

    def add(name: str, samples: Tensor, own_bits: float, ms: float | None, suffix: str) -> None:
        entropy, known = word_scores(to_texts(samples), vocabulary)
        row = {"bits_per_char": own_bits, "judge_bits": bits(judge, samples)}
        row |= {"entropy": entropy, "words": known} | ({} if ms is None else {"ms": ms})
        metrics.update({f"{name}_{key}{suffix}": value for key, value in row.items()})
        shown = "  ".join(f"{key} {value:.4g}" for key, value in row.items())
        print(f"{name}{suffix}: {shown}\n    {to_texts(samples[:1])[0]}", flush=True)

    add("real", x, bits(judge, x), None, "")
    for folder in options.baselines:
        model = vssm.load(folder).to(device)
        engine, kind = vssm.Engine(model), model.config.kind
        samples = engine.generate(num=num, length=length).x
        ms = milliseconds(lambda seed, e=engine: e.generate(length=length, seed=seed))
        add(kind, samples, bits(model, x), ms, "")
        metrics[f"{kind}_parameters"] = sum(p.numel() for p in model.parameters())
    for folder in options.runs:
        model = vssm.load(folder).to(device)
        assert isinstance(model, AnyPart), f"{folder}: train it with --model.known any"
        name = Path(folder).name
        metrics[f"{name}_parameters"] = sum(p.numel() for p in model.parameters())
        for passes in PASSES:
            write = partial(from_nothing, vssm.Engine(model), length, passes)
            draws = options.num_samples if passes <= (model.config.latent_passes or passes) else 1
            own = bits(model, x, passes, draws)
            add(name, write(num, 0), own, milliseconds(partial(write, 1)), f"_s{passes}")
    command = "python " + " ".join(["experiments/text_passes.py", *sys.argv[1:]])
    config = {"part": options.part, "num_samples": options.num_samples, "judge": options.judge}
    path = Path(options.out) / f"{options.name}_passes.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_result(path, result(path.stem, command, config, metrics))


if __name__ == "__main__":
    main()
