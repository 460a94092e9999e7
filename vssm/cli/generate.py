"""`vssm generate`: samples from a model on this machine or from the hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

import vssm
from vssm.checks import choose_device, whole_number
from vssm.cli.samples import check_files, check_state_target, read_prompt, write_samples
from vssm.data import Meta, steps_left
from vssm.models import Model, first_weight
from vssm.runs.checkpoint import load_finite
from vssm.runs.config import SavedConfig, refuse_forecaster
from vssm.runs.pretrained import find


@dataclass
class Generate:
    """Generates samples, a picture or text, and a state to resume from."""

    run_folder: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
    """A run folder, a folder of vssm.save, a shipped model's name, or hf://OWNER/NAME."""
    num: int | None = None
    """How many sequences; 16, or the rows of the prompt or state."""
    length: int | None = None
    """How many new steps, 1 or more. By default as many as complete a sequence of the length of the
    training sequences (28 if that is not known)."""
    prompt: str | None = None
    """What comes first: a .npy file (batch, steps, features) or (steps, features), or text."""
    label: int | None = None
    """The class of the samples, for models that were trained with --labels; all classes in turn by
    default."""
    chunk: int | None = None
    """Generate this many steps at a time (vssm, tvae)."""
    recondition: bool = False
    """Read each generated chunk before generating the next (vssm, tvae). Without --chunk this
    changes only the state, which has then read the samples."""
    passes: int = 1
    """Parallel passes over each chunk: 1 is one shot, more come closer to step by step (vssm,
    tvae)."""
    temperature: float = 1.0
    """Below 1 for safer, above 1 for wilder samples."""
    observe: Literal["mean", "sample"] = "mean"
    """Return the mean of the observation head, or a sample of it."""
    seed: int | None = None
    """Selects the sample; by default 0, or the seed of the state."""
    resume: Path | None = None
    """A file that --state wrote, to continue from."""
    out: Path | None = None
    """Where the samples go: .npy, .png or .txt; by default samples.npy, for text samples.txt."""
    state: Path | None = None
    """Where the state to resume from goes, for example state.safetensors; by default it is not
    kept."""
    device: str = "auto"
    """Where to run: auto, cpu or cuda."""

    def run(self) -> None:
        for name in ("num", "length"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1)
        device, folder = choose_device(self.device), find(self.run_folder)
        refuse_forecaster(folder)
        model, meta = load_finite(folder, device), SavedConfig.read(folder).meta()
        text = meta is not None and meta.suggested_head == "categorical"
        out = self.out or Path("samples.txt" if text else "samples.npy")
        self._check_files(out)
        state = None if self.resume is None else vssm.State.load(self.resume, device)
        if state is not None and state.batch == 1 and (self.num or 1) > 1:
            state = state.repeat(self.num or 1)  # one sample, continued in several ways
        known = 0 if state is None else state.position
        prompt = None if self.prompt is None else read_prompt(self.prompt, model, meta).to(device)
        if prompt is not None:
            model.head.validate(prompt, "prompt", values=False, steps=0)
            known += prompt.shape[1]
        dials = {"passes": self.passes, "temperature": self.temperature, "observe": self.observe}
        if self.label is not None or (meta is not None and meta.classes):
            x, after = self._draw_classes(model, meta, prompt, dials).cpu(), None
        else:
            num = 16 if self.num is None and prompt is None and state is None else self.num
            length = self.length or steps_left(meta, known, "--length")
            dials |= {"chunk": self.chunk, "recondition": self.recondition, "seed": self.seed}
            made = vssm.generate(model, num, length, prompt=prompt, state=state, **dials)
            x, after = made.x.cpu(), made.state
        write_samples(x, None if prompt is None else prompt.cpu(), meta, out)
        print(f"samples: {out}  {tuple(x.shape)}")
        if self.state is not None and after is not None:
            after.save(self.state)
            print(f"state: {self.state}, after step {after.position}")

    def _draw_classes(
        self, model: Model, meta: Meta | None, prompt: torch.Tensor | None, dials: dict[str, Any]
    ) -> torch.Tensor:
        """Draws the steps after the prompt of sequences of a class, or of all classes in turn."""
        if meta is None or not meta.classes:
            raise ValueError(
                f"label={self.label} is for models that were trained with labels; "
                "train with --model.known any --labels"
            )
        if self.label is not None and not 0 <= self.label < meta.classes:
            raise ValueError(f"label={self.label} is unknown; use 0 to {meta.classes - 1}")
        for name in ("chunk", "recondition", "resume", "state"):
            if getattr(self, name):
                raise ValueError(
                    f"--{name} is not for models that were trained with labels; leave it out"
                )
        num = self.num or (16 if prompt is None else len(prompt))
        device = first_weight(model).device
        first = 0 if prompt is None else prompt.shape[1]
        length = first + (self.length or steps_left(meta, first, "--length"))
        x = torch.full((num, length, meta.features), torch.nan, device=device)
        if prompt is not None:
            meta.without_given(x)[:, :first] = prompt
        labels = torch.arange(num, device=device) % meta.classes
        labels = labels if self.label is None else torch.full_like(labels, self.label)
        x[..., -meta.classes :] = torch.nn.functional.one_hot(labels, meta.classes)[:, None].to(x)
        made = vssm.fill(model, x, **dials, seed=self.seed or 0)
        return meta.without_given(made)[:, first:]

    def _check_files(self, out: Path) -> None:
        """Raises if a file cannot be written or would replace one that is read."""
        if out.suffix not in (".npy", ".png", ".txt"):
            raise ValueError(f"out={str(out)!r} is not allowed; use .npy, .png or .txt")
        prompt = Path(self.prompt) if self.prompt and self.prompt.endswith(".npy") else None
        check_files({"out": out, "state": self.state}, {"prompt": prompt})
        check_files({"out": out}, {"resume": self.resume})  # the new state may replace the old one
        if self.state is not None:
            check_state_target(self.state)
