"""Times other implementations beside ours, where they are installed, into one result file.

    python experiments/bench_peers.py scan --device cuda --out results/scan_peers_h200.json
    python experiments/bench_peers.py generate --device cpu --out results/generate_epyc-2cores.json
    python experiments/bench_peers.py train --device cpu --out results/train_epyc-2cores.json

It first does what `vssm bench` does with the same options.

| benchmark       | peer                 | what it is                                              |
| --------------- | -------------------- | ------------------------------------------------------- |
| scan            | `mambapy`            | a scan in the steps of mambapy's `MambaBlock`           |
| scan (CUDA)     | `mamba_ssm`          | the CUDA kernel of Mamba's authors                      |
| generate, train | `transformers_gpt2`  | `GPT2Model` of transformers between linear layers       |
| generate, train | `transformers_mamba` | `MambaModel`, the same; it uses mamba_ssm if installed  |

Scans take the arguments of `vssm.ops.selective_scan` and return y; their forward pass records no
graph. Models have the width and depth of ours. They generate at batch 1 and up to 256 steps, with
their own caches, and train on the squared error, with AdamW, in the same precision:

    mean of x_t = out(body(start, in(x_1), ..., in(x_{t-1})))               x (B, T, D)
"""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from vssm.config import PRESETS
from vssm.evaluation.timing import take_times
from vssm.lab.bench import generate, measure, scan, train
from vssm.lab.bench.measure import Record

MODELS = ("transformers_gpt2", "transformers_mamba")
PEER_STEPS = 256


def mambapy_scan(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
) -> Tensor:
    """Returns y of the scan; states are float32, as ours are."""
    from mambapy.pscan import pscan

    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if softplus else dt
    decay = torch.exp(dt.unsqueeze(-1).float() * A)  # (B, T, D, N)
    drive = (dt.unsqueeze(-1) * B.unsqueeze(2) * u.unsqueeze(-1)).float()
    y = (pscan(decay, drive) @ C.float().unsqueeze(-1)).squeeze(3) + D * u
    return (y if z is None else y * F.silu(z)).to(u.dtype)


def mamba_ssm_scan(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
) -> Tensor:
    """Returns y of the scan; this peer has time last, so it copies other inputs first."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    u, dt, B, C = (tensor.transpose(1, 2) for tensor in (u, dt, B, C))
    z = None if z is None else z.transpose(1, 2)
    return selective_scan_fn(u, dt, A, B, C, D, z, dt_bias, softplus).transpose(1, 2)


SCANS: dict[str, Callable[..., Tensor]] = {"mambapy": mambapy_scan, "mamba_ssm": mamba_ssm_scan}


class PeerModel(nn.Module):
    """An autoregressive model around a body of transformers, for sequences of up to `steps`."""

    def __init__(self, name: str, features: int, width: int, layers: int, steps: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2Model, MambaConfig, MambaModel

        self.name = name
        if name == "transformers_gpt2":
            config = GPT2Config(vocab_size=1, n_positions=steps, n_embd=width, n_layer=layers)
            config.n_head, config.bos_token_id, config.eos_token_id = 8, 0, 0
            config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
            self.body = GPT2Model(config)
        else:
            config = MambaConfig(vocab_size=1, hidden_size=width, num_hidden_layers=layers)
            self.body = MambaModel(config)
        self.start = nn.Parameter(torch.zeros(width))
        self.into, self.out = nn.Linear(features, width), nn.Linear(width, features)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the means of all steps, each from the steps before it."""
        start = self.start.expand(len(x), 1, -1).to(x.dtype)
        e = torch.cat([start, self.into(x[:, :-1]).to(x.dtype)], 1)
        return self.out(self.body(inputs_embeds=e, use_cache=False).last_hidden_state)

    @torch.no_grad()
    def generate(self, num: int, length: int) -> Tensor:
        """Returns new sequences, step by step with the body's own cache and noise of 0.1."""
        key = "past_key_values" if self.name == "transformers_gpt2" else "cache_params"
        e, cache, xs = self.start.expand(num, 1, -1), None, []
        for _ in range(length):
            made = self.body(inputs_embeds=e, use_cache=True, **{key: cache})
            cache = getattr(made, key)
            mean = self.out(made.last_hidden_state)
            xs.append(mean + 0.1 * torch.randn_like(mean))
            e = self.into(xs[-1])
        return torch.cat(xs, 1)


@dataclass
class Options:
    what: tyro.conf.Positional[Literal["scan", "generate", "train"]]
    out: Path
    """The file that ours and theirs go to."""
    device: str = "auto"
    repeats: int | None = None
    """How often each call is timed (scan, generate)."""
    shapes: tuple[str, ...] = ()
    """Problems as BxT or BxTxDxN (scan)."""
    lengths: tuple[int, ...] = ()
    """Numbers of steps (generate)."""


def installed(record: Record, peer: str) -> bool:
    """Notes the version of a peer's package, or that it is missing."""
    package = peer.removesuffix("_gpt2").removesuffix("_mamba")
    there = find_spec(package) is not None
    record.note(peer, f"{package} {version(package)}" if there else f"{package} is not installed")
    return there


def time_scans(options: Options, command: str) -> None:
    shapes, repeats = options.shapes or None, options.repeats
    record = scan.main_scan(options.out, device=options.device, shapes=shapes, repeats=repeats)
    record.command = command
    cuda = record.device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    for name in [name for name in (SCANS if cuda else ("mambapy",)) if installed(record, name)]:
        for sizes in record.config["shapes"]:
            shape = scan.Shape(**sizes)
            values = scan.scan_arguments(shape, dtype, record.device, full=cuda)
            if name == "mamba_ssm":  # time last in memory, so that its own copies are not timed
                values |= {
                    key: value.mT.contiguous().mT
                    for key, value in values.items()
                    if isinstance(value, Tensor) and value.ndim == 3
                }
            try:
                scan.time_scan(record, name, SCANS[name], shape, values, peer=True)
            except Exception as error:  # another version of the peer may fail in its own way
                record.note(f"{name}_bwd_ms_{shape.name}", measure.failure(error))
    record.print_times("Selective scan, ms")


def time_generation(options: Options, command: str) -> None:
    lengths, repeats = options.lengths or None, options.repeats
    record = generate.main_generate(
        options.out, device=options.device, lengths=lengths, repeats=repeats
    )
    record.command = command
    width, layers = record.config["width"], record.config["layers"]
    for name in [name for name in MODELS if installed(record, name)]:
        for length in [length for length in lengths or (28, 256) if length <= PEER_STEPS]:
            model = PeerModel(name, generate.FEATURES, width, layers, length)
            call = partial(model.to(record.device).eval().generate, num=1, length=length)
            record.time(f"{name}_ms_b1_t{length}", call, peer=True)
    record.print_times("Generation, ms")


def time_training(options: Options, command: str) -> None:
    record = train.main_train(options.out, device=options.device)
    record.command = command
    for name in [name for name in MODELS if installed(record, name)]:
        train.add_speed(record, name, partial(training_speeds, record, name), peer=True)
    train.print_train_table(record)


def training_speeds(record: Record, name: str) -> tuple[list[float], int]:
    """Returns the tokens per second of every window, and the number of weights."""
    config, device = record.config, record.device
    model = PeerModel(name, train.FEATURES, config["width"], config["layers"], train.LENGTH)
    rate = PRESETS["paper-mnist"].train.learning_rate
    optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=rate, fused=True)
    x = torch.rand(config["batch"], train.LENGTH, train.FEATURES, device=device)

    def window() -> None:
        for _ in range(config["window"]):
            with torch.autocast(device.type, torch.bfloat16, enabled=x.is_cuda):
                mean = model(x)
            optimizer.zero_grad()
            (mean.float() - x).square().sum((1, 2)).mean().backward()
            optimizer.step()

    tokens = config["window"] * config["batch"] * train.LENGTH
    times = take_times(window, device, train.WINDOWS)
    return [1e3 * tokens / taken for taken in times], sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    options = tyro.cli(Options, description=__doc__)
    ways = {"scan": time_scans, "generate": time_generation, "train": time_training}
    ways[options.what](options, f"python {shlex.join(sys.argv)}")
