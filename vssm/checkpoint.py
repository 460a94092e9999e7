"""A model in a folder: `config.json` and `weights.safetensors`, nothing that could run code."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vssm import pretrained
from vssm.config import FORMAT, ModelConfig, check_device
from vssm.models import Model, build
from vssm.storage import write_atomically

__all__ = ["load", "save"]


def save(model: Model, folder: str | Path) -> None:
    """Writes a model to a folder, which is made if it does not exist.

    Example:
        >>> import tempfile, torch, vssm
        >>> model = vssm.build(vssm.ModelConfig(kind="ssm", features=3, width=8, layers=1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(model, folder)
        ...     copy = load(folder)
        >>> all(torch.equal(a, b) for a, b in zip(model.parameters(), copy.parameters()))
        True
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    text = json.dumps({"format": FORMAT, "model": model.config.to_dict()}, indent=2) + "\n"
    write_atomically(folder / "weights.safetensors", lambda path: save_file(tensors, path))
    write_atomically(folder / "config.json", lambda path: path.write_text(text))


def load(folder: str | Path, device: torch.device | str = "cpu") -> Model:
    """Reads a model; whatever does not fit is named and nothing is half-loaded.

    Arguments:
        folder: A folder that `save` or a training wrote, "hf://OWNER/NAME[@REVISION]" on the hub, or the name
            of a model in `vssm.pretrained`; a folder of that name, where there is one, comes first.
        device: Where the weights go.
    """
    if isinstance(folder, str) and folder.startswith("hf://"):
        from vssm.hub import pull

        folder = pull(folder)
    device = check_device(device)
    folder = pretrained.find(folder)
    config = _read_config(folder / "config.json")
    path = folder / "weights.safetensors"
    if not path.is_file():
        raise ValueError(
            f"{str(folder)!r} has no weights.safetensors; allowed: a folder written by vssm.save"
        )
    try:
        tensors = load_file(path, device=str(device))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from None
    try:
        with torch.device("meta"):
            model = build(config)
    except (ValueError, RuntimeError, TypeError) as error:  # sizes beyond what an address can have, too
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{str(folder / 'config.json')!r} describes no model: {reason}") from None
    expected = model.state_dict()
    _check_names(path, set(tensors), set(expected))
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            raise ValueError(
                f"{str(path)!r}: tensor {name!r} has shape {tuple(tensors[name].shape)}; "
                f"allowed: {tuple(tensor.shape)}, by config.json"
            )
        if not tensors[name].is_floating_point():
            raise ValueError(
                f"{str(path)!r}: tensor {name!r} has dtype {tensors[name].dtype}; "
                "allowed: a floating-point dtype"
            )
    # Weights may be stored in fewer bits than the model computes with.
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
    for part in model.modules():
        if isinstance(part, torch.nn.RNNBase):
            part.flatten_parameters()  # cuDNN wants them side by side, and would copy them at every call
    return model.requires_grad_(True)


def _read_config(path: Path) -> ModelConfig:
    if not path.is_file():
        shipped = ", ".join(map(repr, pretrained.names())) or "none in this version"
        raise ValueError(
            f"{str(path.parent)!r} has no config.json; allowed: a folder written by vssm.save, "
            f"or a shipped model ({shipped})"
        )
    try:
        values: Any = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        raise ValueError(f"{str(path)!r} has no key 'model'; allowed: a config written by vssm.save")
    if values.get("format") != FORMAT:
        raise ValueError(
            f"{str(path)!r} has format {values.get('format')!r}; allowed: {FORMAT}, that of this version"
        )
    try:
        return ModelConfig.from_dict(values["model"])
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from None


def _check_names(path: Path, given: set[str], expected: set[str]) -> None:
    for problem, names in (("lacks", expected - given), ("has unknown", given - expected)):
        if names:
            shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ValueError(
                f"{str(path)!r} {problem} tensors {shown}; allowed: those of config.json, no other"
            )
