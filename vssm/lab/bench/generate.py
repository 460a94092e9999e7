"""Generation of fresh models, since time does not depend on what was learned; milliseconds for a whole batch.

| name                     | what runs                                                                    |
| ------------------------ | ---------------------------------------------------------------------------- |
| `<kind>_ms_...`          | T steps from nothing; one shot for vssm and tvae, with caches for the others |
| `<kind>_prompted_ms_...` | the second half of T steps after the first                                   |
| `<kind>_chunk<W>_ms_...` | T steps in four chunks (vssm and tvae)                                       |
| `vssm_l<L>_...`          | the same of a vssm with L levels of latents                                  |
| `..._p10_ms_...`, `p90`  | quantiles of any of these, where it was timed more than once                 |
| `..._mib_...`            | most memory that tensors took, beside what was there before (CUDA)           |
| `<kind>_floor_ms_...`    | what T steps from nothing take at least, see `bench.floor`                   |

Beside them `transformers_gpt2_ms_...` and `transformers_mamba_ms_...`: models of transformers of the same
width and depth, step by step with their own caches, at batch 1 and up to 256 steps.

Weights and products are float32; the config says at which precision PyTorch multiplies. Numbers are medians
after warm-up: `generate` remembers its pass over empty tokens, and on CUDA captures what it repeats, in the
first calls. A call that would break the budget of seconds, or the memory, is left out and noted, never
extrapolated.
"""

import copy
import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vssm.config import KINDS, ModelConfig
from vssm.lab.bench.floor import Rates, generation_floor_ms
from vssm.lab.bench.peers import PEERS, Peer, absence, remark
from vssm.lab.bench.plot import check_plot, plot_result
from vssm.lab.bench.record import Record, number, table, typed
from vssm.lab.bench.timing import Stopwatch, check_whole, open_device, options_of
from vssm.models import Model, build
from vssm.sampling.generation import generate

__all__ = ["bench_generate", "main_generate"]

_FEATURES = 28
_PEER_STEPS = 256


def main_generate(
    out: str | Path | None = None,
    *,
    device: str = "auto",
    kinds: Sequence[str] | None = None,
    levels: Sequence[int] = (),
    batches: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    width: int | None = None,
    layers: int = 4,
    repeats: int | None = None,
    seconds_per_point: float = 20.0,
    peers: bool = True,
    plot: str | Path | None = None,
    restart: bool = False,
) -> dict[str, Any]:
    """Times generation, prints a table and writes the result as JSON if `out` says where.

    Arguments:
        out: The JSON file, written after every number; a run that was stopped goes on from it.
        device: "auto", "cpu", "cuda" or "cuda:N".
        kinds: The models; all six if not given.
        levels: Adds the vssm with so many levels of latents, each under the name vssm_l<L>.
        batches: Numbers of sequences; 1, 16, 128, 1024 on CUDA, 1, 16 on a CPU.
        lengths: Numbers of steps, T; 28, 256, 1024, 4096 on CUDA, 28, 256 on a CPU.
        width: Width of the models; 1024 on CUDA, 256 on a CPU.
        layers: Depth of every stack.
        repeats: How often each call is timed; by default for a tenth of a second, 3 times or more on CUDA,
            5 on a CPU.
        seconds_per_point: What all calls for one number may take.
        peers: Whether to time the models of transformers.
        plot: Where a picture goes, .png or .svg.
        restart: Whether to forget what `out` holds.
    """
    command = typed("generate", main_generate, locals())
    where = open_device(device)
    check_plot(plot)
    cuda = where.type == "cuda"
    kinds = KINDS if kinds is None else kinds
    batches = ((1, 16, 128, 1024) if cuda else (1, 16)) if batches is None else batches
    lengths = ((28, 256, 1024, 4096) if cuda else (28, 256)) if lengths is None else lengths
    width = (1024 if cuda else 256) if width is None else width
    options_of(kinds, levels)
    for name, values in (
        ("batches", batches),
        ("lengths", lengths),
        ("width", [width]),
        ("layers", [layers]),
    ):
        check_whole(name, *values)
    at_least, repeats = (0.1, 3 if cuda else 5) if repeats is None else (0.0, repeats)
    warm = 3 if cuda else 1
    stopwatch = Stopwatch(where, repeats, seconds_per_point, warm, more=True, at_least=at_least)
    config = {
        "width": width,
        "layers": layers,
        "features": _FEATURES,
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    record = Record("generate", command, where, config, out, restart)
    print(f"float32, matrix products at precision {config['matmul_precision']!r}")
    bench_generate(record, stopwatch, kinds, batches, lengths, width, layers, levels)
    if peers:
        _bench_peers(record, stopwatch, lengths, width, layers)
    _show(record)
    made = record.made()
    if plot is not None:
        plot_result(made, plot)
    return made


def bench_generate(
    record: Record,
    stopwatch: Stopwatch,
    kinds: Sequence[str],
    batches: Sequence[int],
    lengths: Sequence[int],
    width: int,
    layers: int,
    levels: Sequence[int] = (),
) -> None:
    """Times all kinds, and the vssm with levels, at all sizes, the shortest first.

    On a CPU all calls of a size take turns. On CUDA each is timed for itself, with a copy of the model
    that is thrown away afterwards together with everything that was captured for it.
    """
    models: dict[str, Model] = {}
    for name, options in options_of(kinds, levels).items():
        config = ModelConfig(features=_FEATURES, width=width, layers=layers, **options)
        models[name] = build(config).to(stopwatch.device)
    rates = Rates.measure(stopwatch.device)
    for length, batch in itertools.product(sorted(set(lengths)), sorted(set(batches))):
        floors = {
            f"{name}_floor_ms_b{batch}_t{length}": generation_floor_ms(model, batch, length, rates)
            for name, model in models.items()
        }
        record.add({name: floor for name, floor in floors.items() if name not in record.metrics})
        if stopwatch.turns:
            calls: dict[str, Callable[[], object]] = {}
            for name, model in models.items():
                for series, call in _calls(model, batch, length).items():
                    calls[f"{name}{series}_ms_b{batch}_t{length}"] = call
            stopwatch.together(record, calls)
            continue
        for name, model in models.items():
            own = copy.deepcopy(model)
            for series, call in _calls(own, batch, length).items():
                stopwatch.alone(record, f"{name}{series}_ms", f"b{batch}_", length, call)
            del own, call
            stopwatch.tidy()


def _calls(model: Model, batch: int, length: int) -> dict[str, Callable[[], object]]:
    """Returns what is timed of a model, by what its names have after the kind."""
    device = next(model.parameters()).device
    calls: dict[str, Callable[[], object]] = {
        "": partial(generate, model, num=batch, length=length)
    }
    if length > 1:
        prompt = torch.rand(batch, length // 2, _FEATURES, device=device)
        calls["_prompted"] = partial(generate, model, length=length - length // 2, prompt=prompt)
    if model.config.kind in ("vssm", "tvae"):
        chunk = max(1, length // 4)
        calls[f"_chunk{chunk}"] = partial(generate, model, num=batch, length=length, chunk=chunk)
    return calls


def _bench_peers(
    record: Record, stopwatch: Stopwatch, lengths: Sequence[int], width: int, layers: int
) -> None:
    """Times the models of transformers, or notes why they can not run."""
    for peer in PEERS:
        reason = absence()
        if reason is not None:
            record.note(f"{peer}_ms", reason)
            continue
        if told := remark(peer):
            record.note(peer, told)
        try:
            for length in sorted({length for length in lengths if length <= _PEER_STEPS}):
                model = Peer(peer, _FEATURES, width, layers, length).to(stopwatch.device).eval()
                stopwatch.alone(
                    record,
                    f"{peer}_ms",
                    "b1_",
                    length,
                    partial(model.generate, num=1, length=length),
                )
        except Exception as error:  # another version of transformers may fail in its own way
            record.fail(f"{peer}_ms", error)


def _show(record: Record) -> None:
    """Prints a row a model and way, a column a size, and how far vssm is ahead of step-by-step models."""
    cells: dict[str, dict[tuple[int, int], float]] = {}
    for name, value in record.metrics.items():
        match = re.fullmatch(r"((?!.*_p[19]0_)\w+?)_ms_b(\d+)_t(\d+)", name)
        if match and value is not None:
            row = re.sub(r"_chunk\d+", " in four chunks", match[1])
            row = row.replace("_prompted", " prompted").replace("_floor", ", floor")
            cells.setdefault(row, {})[int(match[2]), int(match[3])] = value
    places = sorted({place for row in cells.values() for place in row})
    rows = [
        [row, *(number(values.get(place)) for place in places)]
        for row, values in sorted(cells.items())
    ]
    ahead = ["fastest step by step / vssm"]
    for place in places:
        slow = [
            cells[kind][place]
            for kind in ("transformer", "ssm", "rnn", "vrnn")
            if place in cells.get(kind, {})
        ]
        own = cells.get("vssm", {}).get(place)
        ahead.append(f"{min(slow) / own:.1f}x" if slow and own else "")
    title = f"Generation in ms, width {record.config['width']}, {record.config['layers']} layers"
    rows += [ahead] if any(ahead[1:]) else []  # else there is nothing to compare
    table(title, ["B, T", *(f"{batch}, {length}" for batch, length in places)], rows)
