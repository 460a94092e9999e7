"""What the files of comparisons and benchmarks hold, in words, and the tables that show them.

The metrics are those of `vssm.lab.bench` and of scripts in experiments/: bench_peers, table1,
forecast_table, compare_text, serve_load and accelerate_mamba. The page shows a metric that is
unknown here by its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from views import Rank, View, less, more


@dataclass(frozen=True)
class Benchmark:
    """One kind of result file."""

    title: str
    about: str
    views: tuple[View, ...]
    counts: Mapping[str, str] = field(default_factory=dict)
    """Metrics that say what was compared, each as part of one line."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Metrics that stand alone, in words."""
    folded: str = "More"
    """What the folded tables show."""
    of_data: bool = False
    """Whether a file is about a data set rather than a machine."""


def _near_80(value: float) -> float:
    return abs(value - 0.8)


_MODEL = r"(?P<model>\w+?)"
_OURS = r"(?:(?P<model>\w+?)_)?"  # without a model it is ours
_QUANTILES = "(?:p10|p90)"
_SIZE = "batch x length"
_COMPARED: dict[str, tuple[str, Rank]] = {r"b(\d+)_t(\d+)": (r"\1 x \2", less)}
_SIZES: dict[str, tuple[str, Rank]] = {r"b(\d+)_t(\d+)": (r"\1 x \2", None)}
_LENGTHS: dict[str, tuple[str, Rank]] = {r"t(\d+)": (r"\1", less)}
_CHUNKS: dict[str, tuple[str, Rank]] = {r"w(\d+)": (r"W = \1", less)}


def _folded(about: str, pattern: str) -> View:
    return View(about, pattern, _SIZES, _SIZE, folded=True)


_FORECAST = Benchmark(
    "Forecasting",
    "All models are scored on the same windows of the test part, with the protocol of ProbTS: CRPS "
    "is the mean over the quantiles 0.1 ... 0.9 of twice the pinball loss over the sum of |y|. An "
    "80 % interval is best when it covers 80 % of the values. vssm and rnn are `vssm.Forecaster` "
    "with its defaults. The naive forecast repeats the last season with normal noise. The best "
    "value of a column is bold.",
    (
        View(
            "",
            _MODEL + "_{by}",
            {
                r"crps_h(\d+)": (r"CRPS, horizon \1", less),
                r"coverage80_h(\d+)": (r"coverage of the 80 % interval, \1", _near_80),
                r"train_cpu_seconds_h(\d+)": (r"training, CPU s, horizon \1", less),
                r"steps_h(\d+)": (r"training steps, \1", None),
                r"ms_1x(\d+)x(\d+)": (r"ms for \1 paths of \2 steps", less),
            },
        ),
    ),
    of_data=True,
)
_TEXT = Benchmark(
    "Text",
    "Bits per character on a test set; lower is better. They are exact for autoregressive models, "
    "and a bound by importance sampling for models with latents. Times are milliseconds for one "
    "sequence, in one shot where a model can. `docs/text.md` shows samples. The best value of a "
    "column is bold.",
    (
        View(
            "",
            _MODEL + "_{by}",
            {
                "bits_per_char": ("bits per character", less),
                "ms": ("ms per sequence", less),
                "parameters": ("parameters", None),
            },
        ),
        View(
            "Bits per character when a model generates W characters at a time and reads them "
            "before the next; the largest W is one shot:",
            _MODEL + "_bits_per_char_{by}",
            _CHUNKS,
        ),
        View("Milliseconds for the same:", _MODEL + "_ms_{by}", _CHUNKS),
    ),
    of_data=True,
)
_WAYS = {
    "": "whole sequences, unconditional",
    "_plain": "whole sequences, unconditional, by plain `vssm.generate`",
    "_prompted": "the second half of a sequence, given the first",
    r"_chunk\d+": "whole sequences in four chunks",
}
_GENERATE = Benchmark(
    "Generation",
    "Milliseconds for a whole batch of sequences. The models are fresh, since time does not depend "
    "on the weights. vssm and tvae generate in one shot, the others step by step with caches. "
    "Unconditional calls reuse the pass of the partial posterior over empty tokens, which depends "
    "on the weights only; the times are for calls after the first. The peers are models of "
    "transformers of the same width and depth, with their own caches. The best value of a row is "
    "bold.",
    (
        *(
            View(f"Median, ms: {words}.", f"{_MODEL}{way}_ms_{{by}}", _COMPARED, _SIZE)
            for way, words in _WAYS.items()
        ),
        *(
            _folded(f"10 % and 90 % quantiles, ms: {w}.", f"{_MODEL}{way}_{_QUANTILES}_ms_{{by}}")
            for way, w in _WAYS.items()
        ),
        _folded(
            "Floor (a lower bound for this machine), ms: whole sequences.",
            _MODEL + "_floor_ms_{by}",
        ),
        *(
            _folded(
                f"Peak memory beyond what was in use before, MiB: {words}.",
                f"{_MODEL}{way}_mib_{{by}}",
            )
            for way, words in _WAYS.items()
        ),
    ),
    folded="Quantiles, floors and memory",
)
_SCAN = Benchmark(
    "Scan",
    "Milliseconds of the selective scan, forward and backward. The other implementations do all "
    "the work around the scan that ours fuses. On a GPU: bfloat16 with softplus, bias, skip and "
    "gate. On a CPU: float32 without gate and softplus, because mambapy has neither. The best "
    "value of a row is bold.",
    (
        View("Forward, median, ms.", _OURS + "fwd_ms_{by}", _COMPARED, _SIZE),
        View("Backward, median, ms.", _OURS + "bwd_ms_{by}", _COMPARED, _SIZE),
        _folded("Floor (a lower bound for this machine), ms.", "(?P<model>floor(?:_bwd)?)_ms_{by}"),
        _folded("10 % and 90 % quantiles, ms.", rf"(?P<model>\w+?)_{_QUANTILES}_ms_{{by}}"),
        _folded("Peak memory beyond the arguments, MiB.", _MODEL + "_mib_{by}"),
        _folded(
            "Error ‖given − reference‖ / ‖reference‖ against float64, the worst of outputs and all "
            "gradients; and whether a second run gave the same bits (1) or not (0).",
            "(?P<model>error_float32|error_bfloat16|same_bits)_{by}",
        ),
    ),
    values={"copy_gb_per_second": "speed of a copy in memory, GB per second"},
    folded="Quantiles, floors, memory and errors",
)
_TRAIN = Benchmark(
    "Training",
    "Throughput of `vssm train` itself, read from its log after kernels are compiled: the median "
    "over ten windows of steps, with the 10 % and 90 % quantiles. The ceiling is an upper bound "
    "for that model on this machine. The peers are models of transformers of the same width and "
    "depth. Models differ in size. The best value of a column is bold.",
    (
        View(
            "",
            _MODEL + "_{by}",
            {
                "tokens_per_second": ("tokens per second", more),
                "tokens_per_second_(?:p10|p90)": ("10 % to 90 %", None),
                "ceiling_per_second": ("ceiling", None),
                "peak_memory_mib": ("peak memory, MiB", less),
                "parameters": ("parameters", None),
            },
        ),
    ),
)
_TABLE1 = Benchmark(
    "The paper's Table 1",
    "Time against the length of sequences. The paper counts operations; a clock measures time. A "
    "device that is not yet busy does more work in the same time, so an exponent below the "
    "theory's means that the term of that order does not dominate at these lengths. "
    "experiments/table1.py measures this (formerly `vssm bench table1`). The best value of a row "
    "is bold.",
    (
        View("Unconditional sampling, ms.", _MODEL + "_sample_ms_{by}", _LENGTHS, "length"),
        View(
            "Forward and backward pass of training, ms.",
            _MODEL + "_train_ms_{by}",
            _LENGTHS,
            "length",
        ),
        View(
            "Exponent k of the fit time = c length^k over the upper half of the lengths.",
            _MODEL + "_{by}_exponent",
            {"sample": ("sampling", None), "train": ("training", None)},
        ),
    ),
)
_SERVE = Benchmark(
    "Serving",
    "A server under load from clients on the same machine. First, single samples with and without "
    "batching of requests, in turns. Then mixed requests (one sample, many, prompted, in chunks, "
    "streamed, resumed, step by step) against a queue that is shorter than the number of clients; "
    "every answer is compared bit for bit with the same request sent alone.",
    (
        View(
            "",
            _OURS + "{by}",
            {
                "single_requests_per_second": ("requests per second", None),
                "single_requests_per_second_unbatched": ("without batching", None),
                "batching_speedup": ("speed-up by batching", None),
            },
        ),
    ),
    values={
        "requests": "requests",
        "answered": "answered",
        "refused_429": "refused because the queue was full (429)",
        "errors": "errors",
        "lost": "lost",
        "differing": "answers that differ from the same request sent alone",
        "resumed": "resumed",
        "p50_ms": "median time of an answer, ms",
        "p99_ms": "99 % quantile, ms",
        "memory_mib": "memory at the end, MiB",
        "memory_growth_mib": "growth of memory in the second half, MiB",
    },
)
_ACCELERATE = Benchmark(
    "Mamba of transformers, accelerated",
    "MambaForCausalLM of the size of mamba-130m with random weights, float32, with and without "
    "`vssm.accelerate`. The processor's time is what other programs on the machine disturb less.",
    (
        View(
            "Milliseconds by the clock.",
            _OURS + "{by}",
            {
                "prefill_ms_t1024": ("prompt of 1,024 tokens", less),
                "train_ms_b1_t256": ("training step of 256 tokens", less),
                "decode_ms": ("a further token", less),
            },
        ),
        View(
            "Milliseconds of the processor's time.",
            _OURS + "{by}",
            {
                "prefill_cpu_ms_t1024": ("prompt of 1,024 tokens", less),
                "train_cpu_ms_b1_t256": ("training step of 256 tokens", less),
                "decode_cpu_ms": ("a further token", less),
            },
        ),
    ),
    values={
        "prefill_cpu_speedup_t1024": "speed-up of the prompt, in the processor's time",
        "train_cpu_speedup_b1_t256": "speed-up of the training step, in the processor's time",
        "decode_cpu_speedup": "speed-up of a further token, in the processor's time",
        "prefill_speedup_t1024": "speed-up of the prompt, by the clock",
        "train_speedup_b1_t256": "speed-up of the training step, by the clock",
        "decode_speedup": "speed-up of a further token, by the clock",
        "logits_error": "relative distance of the logits",
        "loss_error": "relative distance of the loss",
        "gradient_error": "largest relative distance of a parameter's gradient",
        "same_tokens": "share of equal tokens in greedy generation",
        "distinct_tokens": "different tokens among them",
        "parameters": "parameters",
    },
)
_BY_NAME = {
    "accelerate": _ACCELERATE,
    "text": _TEXT,
    "generate": _GENERATE,
    "scan": _SCAN,
    "train": _TRAIN,
    "table1": _TABLE1,
    "serve": _SERVE,
}
SECTIONS = {
    "Forecasting": (_FORECAST,),
    "Text": (_TEXT,),
    "Speed": (_GENERATE, _SCAN, _TRAIN, _TABLE1, _ACCELERATE),
    "Serving": (_SERVE,),
}


def benchmark(result: Mapping[str, Any]) -> Benchmark | None:
    """Returns the kind of a result by its name, or None if that is unknown."""
    name = result["name"]
    return _FORECAST if name.startswith("forecast ") else _BY_NAME.get(name)
