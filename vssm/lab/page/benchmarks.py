"""What the files of comparisons and benchmarks hold, in words, and the sections of the page that show them.

The names of metrics are those of `vssm.lab.compare_forecasts`, `vssm.lab.compare_text`, `vssm.lab.bench` and
of experiments/serve_load.py, which describe them. A metric that is not known here is shown by its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vssm.lab.page.views import Best, View, less, more

__all__ = ["SECTIONS", "Benchmark", "benchmark"]


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
    """Whether a file is about a data set, not about a machine."""


def _near_80(value: float) -> float:
    return abs(value - 0.8)


_MODEL = r"(?P<model>\w+?)"
_OURS = r"(?:(?P<model>\w+?)_)?"  # no model is ours
_QUANTILES = "(?:p10|p90)"
_SIZE = "batch x length"
_COMPARED: dict[str, tuple[str, Best]] = {r"b(\d+)_t(\d+)": (r"\1 x \2", less)}
_SIZES: dict[str, tuple[str, Best]] = {r"b(\d+)_t(\d+)": (r"\1 x \2", None)}
_LENGTHS: dict[str, tuple[str, Best]] = {r"t(\d+)": (r"\1", less)}

_FORECAST = Benchmark(
    "Forecasting",
    "Models that were trained in the same run on the same split, and scored on rolling windows of the test "
    "part. CRPS scores sample paths a value at a time, the energy score whole paths, and MAE is the mean "
    "error of the median, all in deviations of a column. MASE is that error over the one of the seasonal "
    "naive forecast in training, WQL the weighted quantile loss. Of all of these less is better; the 80 % "
    "interval is best where it holds 80 % of what came. The temperature of our models is fitted to the "
    "validation part; where it is not 1, the scores at 1 stand beside. DeepAR is that of GluonTS, naive the "
    "seasonal naive forecast with normal noise. The best of a column is bold.",
    (
        View(
            "",
            _MODEL + "_{by}",
            {
                "crps": ("CRPS", less),
                "coverage80": ("coverage of the 80 % interval", _near_80),
                "mase": ("MASE", less),
                "energy": ("energy score", less),
                "wql": ("WQL", less),
                "mae": ("MAE", less),
                r"ms_1x(\d+)x(\d+)": (r"ms for \1 paths of \2 steps", less),
                r"ms_(\d+)x(\d+)x(\d+)": (r"ms for \1 series, \2 paths of \3 steps", less),
                "train_seconds": ("training, s", less),
                "parameters": ("parameters", None),
                "temperature": ("temperature", None),
            },
        ),
    ),
    counts={
        "windows": "{} windows",
        "columns": "{} columns",
        "horizon": "a horizon of {} steps",
        "samples": "{} sample paths of each",
    },
    of_data=True,
)
_CHUNKS: dict[str, tuple[str, Best]] = {r"w(\d+)": (r"W = \1", less)}
_TEXT = Benchmark(
    "Text",
    "Bits a character on a test set, less is better: exact for autoregressive models, a bound by importance "
    "sampling for models with latents. Times are milliseconds for one sequence, in one shot where a model "
    "can. Samples and what they are like are in `docs/text.md`. The best of a column is bold.",
    (
        View(
            "",
            _MODEL + "_{by}",
            {
                "bits_per_char": ("bits a character", less),
                "ms": ("ms a sequence", less),
                "parameters": ("parameters", None),
            },
        ),
        View(
            "Bits a character when a model generates W characters at a time and reads them before the next; "
            "the largest W is one shot:",
            _MODEL + "_bits_per_char_{by}",
            _CHUNKS,
        ),
        View("Milliseconds of the same:", _MODEL + "_ms_{by}", _CHUNKS),
    ),
    of_data=True,
)
_WAYS = {
    "": "whole sequences from nothing",
    "_prompted": "the second half of a sequence, given the first",
    r"_chunk\d+": "whole sequences in four chunks",
}
_GENERATE = Benchmark(
    "Generation",
    "Milliseconds for a whole batch of sequences, of fresh models, since time does not depend on what was "
    "learned: in one shot for vssm and tvae, step by step with caches for the others. From nothing, these "
    "two keep the pass of the partial posterior over empty tokens, which depends on the weights alone, from "
    "one call to the next: times are of calls after the first, which runs it too. Beside them models of "
    "transformers of the same width and depth with their own caches. The best of a row is bold.",
    (
        *(
            View(f"Median, ms: {words}.", f"{_MODEL}{way}_ms_{{by}}", _COMPARED, _SIZE)
            for way, words in _WAYS.items()
        ),
        *(
            View(
                f"10 % and 90 % quantiles, ms: {words}.",
                f"{_MODEL}{way}_{_QUANTILES}_ms_{{by}}",
                _SIZES,
                _SIZE,
                True,
            )
            for way, words in _WAYS.items()
        ),
        View(
            "Floor, what no program of this accuracy can beat on this machine, ms: whole sequences.",
            _MODEL + "_floor_ms_{by}",
            _SIZES,
            _SIZE,
            True,
        ),
        *(
            View(
                f"Most memory beside what was there before, MiB: {words}.",
                f"{_MODEL}{way}_mib_{{by}}",
                _SIZES,
                _SIZE,
                True,
            )
            for way, words in _WAYS.items()
        ),
    ),
    folded="Quantiles, floors and memory",
)
_PATHS = Benchmark(
    "Generation of forecasts",
    "Milliseconds for all sample paths of all series, of fresh models, reading the history included. A "
    "model makes P points a step, and more make any model faster: what is left between equal P is what "
    "parallel generation gives. The best of a row is bold.",
    (
        View("", _MODEL + "_ms_{by}", _LENGTHS, "horizon"),
        View(
            "How many times faster vssm is than an rnn with P = 1:",
            r"ahead(?P<model>_p\d+)_{by}",
            {r"t(\d+)": (r"\1", None)},
            "horizon",
        ),
    ),
)
_SCAN = Benchmark(
    "Scan",
    "Milliseconds of the selective scan, forward and backward, beside other implementations with all the "
    "work around it that ours fuses. On a GPU in bfloat16 with softplus, bias, skip and gate; on a CPU in "
    "float32 without gate and softplus, because one of the others has neither. The best of a row is bold.",
    (
        View("Forward, median, ms.", _OURS + "fwd_ms_{by}", _COMPARED, _SIZE),
        View("Backward, median, ms.", _OURS + "bwd_ms_{by}", _COMPARED, _SIZE),
        View(
            "Floor, what no scan of this accuracy can beat on this machine, ms.",
            "(?P<model>floor(?:_bwd)?)_ms_{by}",
            _SIZES,
            _SIZE,
            True,
        ),
        View(
            "10 % and 90 % quantiles, ms.",
            rf"(?P<model>\w+?)_{_QUANTILES}_ms_{{by}}",
            _SIZES,
            _SIZE,
            True,
        ),
        View(
            "Most memory while they ran, beyond their arguments, MiB.",
            _MODEL + "_mib_{by}",
            _SIZES,
            _SIZE,
            True,
        ),
        View(
            "Error ‖given − reference‖ / ‖reference‖ against float64, the worst of outputs and all "
            "gradients; and whether a second run gave the same bits everywhere (1) or not (0).",
            "(?P<model>error_float32|error_bfloat16|same_bits)_{by}",
            _SIZES,
            _SIZE,
            True,
        ),
    ),
    values={"copy_gb_per_second": "speed of a copy in memory, GB a second"},
    folded="Quantiles, floors, memory and errors",
)
_TRAIN = Benchmark(
    "Training",
    "Throughput of `vssm train` itself, read from its log after kernels are compiled: the median over ten "
    "windows of steps and their 10 % and 90 % quantiles. The ceiling is what no training of that model can "
    "exceed on this machine. Beside them models of transformers of the same width and depth. Models differ "
    "in size. The best of a column is bold.",
    (
        View(
            "",
            _MODEL + "_{by}",
            {
                "tokens_per_second": ("tokens a second", more),
                "tokens_per_second_(?:p10|p90)": ("10 % to 90 %", None),
                "ceiling_per_second": ("ceiling", None),
                "peak_memory_mib": ("most memory, MiB", less),
                "parameters": ("parameters", None),
            },
        ),
    ),
)
_TABLE1 = Benchmark(
    "The paper's Table 1",
    "Time against the length of sequences. The paper counts work, a clock measures it: a device that is not "
    "yet busy does more work in the same time, so an exponent below the theory's means that the term of "
    "that order is not what takes the time at these lengths. The best of a row is bold.",
    (
        View("Sampling from nothing, ms.", _MODEL + "_sample_ms_{by}", _LENGTHS, "length"),
        View(
            "Forward and backward of training, ms.", _MODEL + "_train_ms_{by}", _LENGTHS, "length"
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
    "A server under load from clients on the same machine. First single samples, with batching of requests "
    "and without, by turns; then mixed requests (one sample, many, prompted, in chunks, streamed, resumed, "
    "step by step) against a queue shorter than the number of clients, where every answer is compared, bit "
    "for bit, with the same request sent alone.",
    (
        View(
            "",
            _OURS + "{by}",
            {
                "single_requests_per_second": ("requests a second", None),
                "single_requests_per_second_unbatched": ("without batching", None),
                "batching_speedup": ("times faster with batching", None),
            },
        ),
    ),
    values={
        "requests": "requests",
        "answered": "answered",
        "refused_429": "refused, since the queue was full (429)",
        "errors": "errors",
        "lost": "lost",
        "differing": "answers that differ from those of the request alone",
        "resumed": "resumed",
        "p50_ms": "median time of an answer, ms",
        "p99_ms": "99 % quantile, ms",
        "memory_mib": "memory at the end, MiB",
        "memory_growth_mib": "growth of memory in the second half, MiB",
    },
)
_BY_NAME = {
    "text": _TEXT,
    "generate": _GENERATE,
    "forecast": _PATHS,
    "scan": _SCAN,
    "train": _TRAIN,
    "table1": _TABLE1,
    "serve": _SERVE,
}
SECTIONS = {
    "Forecasting": (_FORECAST,),
    "Text": (_TEXT,),
    "Speed": (_GENERATE, _PATHS, _SCAN, _TRAIN, _TABLE1),
    "Serving": (_SERVE,),
}


def benchmark(result: Mapping[str, Any]) -> Benchmark | None:
    """Returns what a result is, by the name that what measures it gives it; None if that is unknown."""
    name = result["name"]
    return _FORECAST if name.startswith("forecast ") else _BY_NAME.get(name)
