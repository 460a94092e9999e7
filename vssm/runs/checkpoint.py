"""A model in a folder: `config.json` and `weights.safetensors`, nothing that could run code.

Two files can not be replaced at once, so the weights that `save` writes carry their config, in the metadata:
killed between the two it leaves the new model, beside the `config.json` of the old one.
"""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vssm.checks import check_device, check_path
from vssm.config import FORMAT, ModelConfig
from vssm.models import Model, build, inner_model
from vssm.nn import BLOCKS
from vssm.runs import pretrained
from vssm.storage import check_checksum, with_checksum, write_atomically
from vssm.threads import single_after_fork

__all__ = ["config_of", "load", "load_finite", "save"]

_METADATA = "vssm"  # the key in the metadata of the weights that has the text of their config.json


def save(model: Model, folder: str | Path) -> None:
    """Writes a model to a folder, which is made if it does not exist.

    A model that was saved there before is replaced; a run of `vssm train` is not.

    Arguments:
        model: Any of the six models.
        folder: Where it goes.

    Example:
        >>> import tempfile, torch, vssm
        >>> model = vssm.build(vssm.ModelConfig(kind="ssm", features=3, width=8, layers=1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(model, folder)
        ...     copy = load(folder)
        >>> all(torch.equal(a, b) for a, b in zip(model.parameters(), copy.parameters()))
        True
    """
    model = inner_model(model)
    check_path("folder", folder)
    folder = Path(folder)
    _check_target(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    _check_own(model, tensors)
    text = json.dumps({"format": FORMAT, "model": model.config.to_dict()}, indent=2) + "\n"
    metadata = with_checksum(tensors, {_METADATA: text})
    write_atomically(
        folder / "weights.safetensors", lambda path: save_file(tensors, path, metadata)
    )
    write_atomically(folder / "config.json", lambda path: path.write_text(text))


def load(folder: str | Path, device: torch.device | str = "cpu") -> Model:
    """Reads a model; whatever does not fit is named and nothing is half-loaded.

    Weights that carry their config are of that model; a `config.json` that has another is warned of.

    Arguments:
        folder: A folder that `save` or a training wrote, "hf://OWNER/NAME[@REVISION]" on the hub, or the name
            of a model in `vssm.runs.pretrained`; a folder of that name, where there is one, comes first.
        device: Where the weights go.

    Returns:
        The model in float32, ready to train, score or generate.

    Example:
        >>> import vssm
        >>> model = vssm.load("mnist-small")
        >>> model.config.kind, vssm.generate(model, num=1, length=2).x.shape
        ('vssm', torch.Size([1, 2, 28]))
    """
    single_after_fork()
    folder, device = _found(folder), check_device(device)
    config = _read_config(folder / "config.json")
    path = folder / "weights.safetensors"
    if not path.is_file():
        raise ValueError(
            f"{str(folder)!r} has no weights.safetensors; allowed: a run folder once it has weights, "
            "or a folder written by vssm.save"
        )
    tensors, own = _read_weights(path, device)
    if own is not None and own != config:
        names = [field.name for field in dataclasses.fields(own)]
        pairs = [(name, getattr(own, name), getattr(config, name)) for name in names]
        saved = ", ".join(f"{name}={mine!r}" for name, mine, other in pairs if mine != other)
        warnings.warn(
            f"{str(folder / 'config.json')!r} is of another model than the weights beside it, which were "
            f"saved with {saved} and are loaded so; saving the model again makes them agree",
            stacklevel=2,
        )
        config = own
    try:
        with torch.device("meta"):
            _check_depth(config, folder, len(tensors))
            model = build(config)
    except (
        ValueError,
        RuntimeError,
        TypeError,
    ) as error:  # sizes beyond what an address can have, too
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


def load_finite(folder: str | Path, device: torch.device | str = "cpu") -> Model:
    """Does what `load` does, for models that answer: numbers that are none would look like any others."""
    model = load(folder, device)
    odd = next(
        (name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()), None
    )
    if odd is not None:
        raise ValueError(
            f"{str(folder)!r}: tensor {odd!r} holds NaN or infinity; allowed: finite weights"
        )
    return model


def config_of(folder: str | Path) -> ModelConfig:
    """Returns the settings of a model, found as `load` finds it.

    Example:
        >>> config_of("mnist-small").kind
        'vssm'
    """
    folder = _found(folder)
    path = folder / "weights.safetensors"
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError):  # it is the reader of the weights who says so
        metadata = {}
    own = metadata.get(_METADATA)
    return _read_config(folder / "config.json") if own is None else _parse_config(own, path)


def _found(folder: str | Path) -> Path:
    check_path("folder", folder)
    return pretrained.find(folder)


def _check_own(model: Model, tensors: dict[str, Tensor]) -> None:
    """Raises unless a model has what its config says: `load` could not read anything else."""
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in build(model.config).state_dict().items()}
    given = {name: tensor.shape for name, tensor in tensors.items()}
    if given != expected:
        names = sorted(
            name for name in {**given, **expected} if given.get(name) != expected.get(name)
        )
        raise ValueError(
            f"the model differs from what its config builds in {', '.join(names[:3])}"
            + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            + "; allowed: the same tensors, without parametrizations or new layers"
        )


def _check_target(folder: Path) -> None:
    """Raises unless a model may be written to a folder: no file is in the way, no run is replaced."""
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(
                f"folder={str(folder)!r}: {str(place)!r} is a file; allowed: a folder, or a new name"
            )
    try:
        values = json.loads((folder / "config.json").read_bytes())
    except (
        OSError,
        ValueError,
        RecursionError,
    ):  # there is none, or none that a run could go on with
        return
    if isinstance(values, dict) and ("data" in values or "train" in values):
        raise ValueError(
            f"folder={str(folder)!r} is a run, whose weights and settings would be lost; "
            "allowed: a new folder, or one written by vssm.save"
        )
    if not isinstance(values, dict) or "model" not in values:
        raise ValueError(
            f"folder={str(folder)!r} has a config.json of something else, which would be lost; "
            "allowed: a new folder, or one written by vssm.save"
        )


def _read_config(path: Path) -> ModelConfig:
    if not path.is_file():
        shipped = ", ".join(map(repr, pretrained.names())) or "none in this version"
        lacks = "has no config.json" if path.parent.exists() else "does not exist"
        raise ValueError(
            f"{str(path.parent)!r} {lacks}; allowed: a run folder, a folder written by vssm.save, "
            f"or a shipped model ({shipped})"
        )
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from None
    return _parse_config(text, path)


def _read_weights(path: Path, device: torch.device) -> tuple[dict[str, Tensor], ModelConfig | None]:
    """Returns the tensors, and the config that they carry, if they do."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from None
    check_checksum(repr(str(path)), tensors, metadata)
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    return tensors, _parse_config(metadata[_METADATA], path) if _METADATA in metadata else None


def _parse_config(text: str, path: Path) -> ModelConfig:
    try:
        values: Any = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        raise ValueError(
            f"{str(path)!r} has no key 'model'; allowed: a config written by vssm.save"
        )
    if values.get("format") != FORMAT:
        raise ValueError(
            f"{str(path)!r} has format {values.get('format')!r}; allowed: {FORMAT}, that of this version"
        )
    try:
        return ModelConfig.from_dict(values["model"])
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from None


def _check_depth(config: ModelConfig, folder: Path, tensors: int) -> None:
    """Raises if there are too few tensors for all blocks: millions of those would take hours to build.

    Other sizes cost nothing before weights are allocated.
    """
    needed = (config.layers + config.levels - 1) * len(BLOCKS[config.block](config).state_dict())
    if needed > tensors:
        raise ValueError(
            f"layers={config.layers} and levels={config.levels} need {needed} tensors or more, "
            f"{str(folder / 'weights.safetensors')!r} has {tensors}; allowed: the config it was saved with"
        )


def _check_names(path: Path, given: set[str], expected: set[str]) -> None:
    for problem, names in (("lacks", expected - given), ("has unknown", given - expected)):
        if names:
            shown = ", ".join(sorted(names)[:3]) + (
                f" and {len(names) - 3} more" if len(names) > 3 else ""
            )
            raise ValueError(
                f"{str(path)!r} {problem} tensors {shown}; allowed: those of config.json, no other"
            )
