"""Compares a Mamba model of transformers with and without `vssm.accelerate`: numbers and times.

    python experiments/accelerate_mamba.py --out results/accelerate_epyc-2cores.json

The model has the size of mamba-130m and random weights of the scale of published ones. (With
transformers' default, an `initializer_range` of 0.1, rounding grows from layer to layer: its own
float32 logits are then 3e-4 from those in float64.) Calls alternate between both ways. Metrics
without a prefix are those of `vssm.accelerate`; `transformers_` stands before those of
transformers' own code. Beside each median by the clock stands one of the processor's time,
`..._cpu_ms_...`, which other programs on the machine disturb less.

| metric                                      | meaning                                           |
| ------------------------------------------- | ------------------------------------------------- |
| `logits_error`, `loss_error`                | distance to transformers' code, relative          |
| `gradient_error`                            | the largest of all parameters, relative           |
| `same_tokens`, `distinct_tokens`            | share of equal tokens by greedy generation; kinds |
| `prefill_ms_t1024`                          | a prompt of 1,024 tokens into a cache             |
| `train_ms_b1_t256`                          | forward and backward                              |
| `decode_ms`                                 | a further token                                   |
| `prefill_speedup_t1024`, `..._cpu_speedup_` | how many times as fast as transformers' code      |
"""

import contextlib
import importlib.metadata
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import tyro
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM

import vssm
from vssm.runs.results import result, write_result


def relative_error(given: Tensor, expected: Tensor) -> float:
    return float((given - expected).norm() / expected.norm())


class Both:
    """Runs calls with and without `vssm.accelerate` and collects metrics."""

    def __init__(self, model: MambaForCausalLM, repeats: int) -> None:
        self.model, self.repeats = model, repeats
        self.metrics: dict[str, float] = {}

    def ways(self) -> dict[str, Callable]:
        return {"": lambda: vssm.accelerate(self.model), "transformers_": contextlib.nullcontext}

    def returns(self, call: Callable) -> list:
        """Returns what a call returns with our kernels and with transformers' code."""
        made = []
        for way in self.ways().values():
            with way():
                made.append(call())
        return made

    def time(self, name: str, where: str, call: Callable) -> list:
        """Does what `returns` does and adds the medians of milliseconds, and the speed-ups."""
        times: dict[str, list[tuple[float, float]]] = {prefix: [] for prefix in self.ways()}
        with vssm.accelerate(self.model):
            made = {"": call()}  # compiles what is not compiled yet
        for _ in range(self.repeats):
            for prefix, way in self.ways().items():
                with way():
                    clock, processor = time.perf_counter(), time.process_time()
                    made[prefix] = call()
                    spent = time.perf_counter() - clock, time.process_time() - processor
                times[prefix].append(spent)
        for index, kind in enumerate(("", "_cpu")):
            ours, theirs = (
                1e3 * statistics.median(each[index] for each in times[prefix])
                for prefix in ("", "transformers_")
            )
            self.metrics[f"{name}{kind}_ms{where}"] = ours
            self.metrics[f"transformers_{name}{kind}_ms{where}"] = theirs
            self.metrics[f"{name}{kind}_speedup{where}"] = theirs / ours
            print(f"{name}{kind}{where}: {ours:.1f} ms, transformers {theirs:.1f} ms", flush=True)
        return list(made.values())


def main(
    out: Path | None = None,
    device: str = "cpu",
    threads: int = 1,
    layers: int = 24,
    width: int = 768,
    initializer_range: float = 0.02,
    prompt: int = 1024,
    train_length: int = 256,
    new_tokens: int = 32,
    repeats: int = 3,
) -> dict:
    """Prints and returns the result, and writes it to a file if one is given."""
    options = {name: value for name, value in locals().items() if name != "out"}
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = MambaConfig(
        hidden_size=width, num_hidden_layers=layers, initializer_range=initializer_range
    )
    model = MambaForCausalLM(config).to(device)
    both = Both(model, repeats)
    tokens = torch.randint(0, config.vocab_size, (1, prompt), device=device)
    lesson = tokens[:, :train_length]

    def train(length: int = train_length) -> tuple[Tensor, Tensor, list[Tensor]]:
        model.train()
        model.zero_grad()
        made = model(lesson[:, :length], labels=lesson[:, :length])
        made.loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        _finish(device)
        return made.logits.detach(), made.loss.detach(), gradients

    @torch.no_grad()
    def prefill() -> object:
        model.eval()
        made = model(tokens, use_cache=True, logits_to_keep=1)
        _finish(device)
        return made.cache_params

    @torch.no_grad()
    def generate() -> Tensor:
        model.eval()
        chosen = {"do_sample": False, "max_new_tokens": new_tokens, "eos_token_id": None}
        return model.generate(lesson[:, :16], **chosen)[0, 16:]

    @torch.no_grad()
    def decode() -> None:
        model(tokens[:, :1], use_cache=True, cache_params=cache)
        _finish(device)

    ours, theirs = both.returns(generate)
    both.metrics["same_tokens"] = float((ours == theirs).float().mean())
    both.metrics["distinct_tokens"] = len(theirs.unique())
    ours, theirs = both.time("train", f"_b1_t{train_length}", train)
    errors = {
        "logits": relative_error(ours[0], theirs[0]),
        "loss": relative_error(ours[1], theirs[1]),
    }
    errors["gradient"] = max(map(relative_error, ours[2], theirs[2]))
    both.metrics |= {f"{name}_error": error for name, error in errors.items()}
    print(both.metrics, flush=True)
    both.time("prefill", f"_t{prompt}", prefill)
    with vssm.accelerate(model):
        cache = prefill()
    both.time("decode", "", decode)
    both.metrics["parameters"] = sum(p.numel() for p in model.parameters())
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    command = shlex.join(["python", *sys.argv])
    made = result("accelerate", command, {**options, "versions": versions}, both.metrics)
    if out is not None:
        write_result(out, made)
    return made


def _finish(device: str) -> None:
    """Waits for the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    tyro.cli(main)
