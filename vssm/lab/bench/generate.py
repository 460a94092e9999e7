"""Generation with fresh models (weights do not change the time); milliseconds for a whole batch.

| metric                   | what runs                                                            |
| ------------------------ | -------------------------------------------------------------------- |
| `<kind>_ms_...`          | T unconditional steps of an engine; one shot for vssm and tvae       |
| `<kind>_plain_ms_...`    | the same by plain `vssm.generate`, which keeps nothing               |
| `<kind>_prompted_ms_...` | the second half of T steps after the first                           |
| `<kind>_chunk<W>_ms_...` | T steps in four chunks (vssm and tvae)                               |
| `vssm_l<L>_...`          | the same for a vssm with L levels of latents                         |
| `..._p10_ms_...`, `p90`  | quantiles of any of these, where it was timed more than once         |
| `..._mib_...`            | peak memory beyond what was in use before (CUDA)                     |

Weights and products are float32; the config says at which precision PyTorch multiplies. A call
that would take too long, or too much memory, is left out and noted, never extrapolated.
"""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from vssm.config import KINDS, ModelConfig
from vssm.engine import Engine
from vssm.lab.bench import measure
from vssm.lab.bench.measure import Record
from vssm.models import Model, build
from vssm.sampling.generation import generate

FEATURES = 28
"""D of the models."""


def main_generate(
    out: Path | None = None,
    *,
    device: str = "auto",
    kinds: tuple[str, ...] = KINDS,
    levels: tuple[int, ...] = (),
    batches: tuple[int, ...] = (),
    lengths: tuple[int, ...] = (),
    width: int | None = None,
    layers: int = 4,
    repeats: int | None = None,
    seconds_per_point: float = 20.0,
) -> Record:
    """Times generation.

    Arguments:
        out: Where the JSON goes.
        device: Where to run: auto, cpu or cuda.
        kinds: The models.
        levels: Also time the vssm with this many levels of latents, as vssm_l<L>.
        batches: Numbers of sequences.
        lengths: Numbers of steps in a sequence.
        width: Width of the models.
        layers: Depth of every stack.
        repeats: How often each call is timed.
        seconds_per_point: Seconds that all calls for one number may take.
    """
    command = measure.command_line("vssm bench generate", main_generate, locals())
    where = measure.open_device(device)
    cuda = where.type == "cuda"
    models = measure.model_options(kinds, levels)
    batches = batches or ((1, 16, 128, 1024) if cuda else (1, 16))
    lengths = lengths or ((28, 256, 1024, 4096) if cuda else (28, 256))
    width = (1024 if cuda else 256) if width is None else width
    measure.check_sizes(batches=batches, lengths=lengths, width=width, layers=layers)
    size = {"width": width, "layers": layers, "features": FEATURES}
    config = {**size, "matmul_precision": torch.get_float32_matmul_precision()}
    record = Record("generate", command, where, config, out, repeats, seconds_per_point)
    built = {name: build(ModelConfig(**size, **own)).to(where) for name, own in models.items()}
    sizes = itertools.product(sorted(set(lengths)), sorted(set(batches)), built.items())
    for length, batch, (name, model) in sizes:
        _time(record, name, model, batch, length)
    record.print_times("Generation, ms")
    return record


def _time(record: Record, name: str, model: Model, batch: int, length: int) -> None:
    """Times a model in every way, with an engine that is dropped at the end with its graphs."""
    engine, calls = Engine(model), dict[str, Callable[[], object]]()
    calls[""] = partial(engine.generate, num=batch, length=length)
    calls["_plain"] = partial(generate, model, num=batch, length=length)
    if length > 1:
        prompt = torch.rand(batch, length // 2, FEATURES, device=record.device)
        calls["_prompted"] = partial(engine.generate, length=length - length // 2, prompt=prompt)
    if model.config.kind in ("vssm", "tvae"):
        chunk = max(1, length // 4)
        calls[f"_chunk{chunk}"] = partial(engine.generate, num=batch, length=length, chunk=chunk)
    for way, call in calls.items():
        record.time(f"{name}{way}_ms_b{batch}_t{length}", call)
