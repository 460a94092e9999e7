"""A model in a folder: `config.json` and `weights.safetensors`, neither of which can run code.

`save` also puts the config into the weights: if it is killed between the two files, `load` still
reads the new model.
"""

import warnings
from pathlib import Path

import torch

from vssm.checks import check_device, check_model, check_path
from vssm.config import FORMAT
from vssm.data.storage import check_folder, read_object, read_tensors, write_tensors
from vssm.models import Model, build
from vssm.nn import join_weights
from vssm.runs import pretrained
from vssm.runs.config import SavedConfig

_METADATA = "vssm"  # the key of the config in the metadata of the weights


def save(model: Model, folder: str | Path) -> None:
    """Writes a model to a folder, which is made if it does not exist.

    A model that was saved there before is replaced. The folder of a run is refused.

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
    model = check_model(model)
    check_path("folder", folder)
    folder = Path(folder)
    check_target(folder)
    folder.mkdir(parents=True, exist_ok=True)
    values = {"format": FORMAT, "model": model.config.to_dict()}
    config = SavedConfig(folder / "config.json", values)
    write_tensors(folder / "weights.safetensors", model.state_dict(), {_METADATA: config.text()})
    config.write()


def load(folder: str | Path, device: torch.device | str = "cpu") -> Model:
    """Reads a model. An error names anything that does not fit; no model is loaded in part.

    Weights that carry their own config are loaded with it, with a warning if `config.json` differs.

    Arguments:
        folder: A folder that `save` or a training wrote, "hf://OWNER/NAME[@REVISION]" on the hub,
            or the name of a model in `vssm.runs.pretrained`. An existing folder comes before a
            shipped model of the same name.
        device: Where the weights go.

    Returns:
        The model in float32, ready to train, score or generate.

    Example:
        >>> import vssm
        >>> model = vssm.load("mnist-best-small")
        >>> model.config.kind, vssm.generate(model, num=1, length=2).x.shape
        ('vssm', torch.Size([1, 2, 28]))
    """
    device, folder = check_device(device), _find(folder)
    saved = SavedConfig.read(folder)
    config, path = saved.model(), folder / "weights.safetensors"
    if not path.is_file():
        raise ValueError(
            f"{str(folder)!r} has no weights.safetensors; use a run folder once it has weights, or "
            "a folder written by vssm.save"
        )
    tensors, metadata = read_tensors(path)
    if _METADATA in metadata:
        own, other = SavedConfig.parse(path, metadata[_METADATA]).model(), config.to_dict()
        config = own
        if changed := {k: v for k, v in own.to_dict().items() if v != other[k]}:
            settings = ", ".join(f"{name}={value!r}" for name, value in changed.items())
            warnings.warn(
                f"{str(saved.path)!r} describes another model than the weights beside it, which "
                f"are loaded with their own {settings}; save the model again to make them agree",
                stacklevel=2,
            )
    # Weights may be stored in fewer bits than the model computes with.
    weights = {name: tensor.to(device).float() for name, tensor in tensors.items()}
    try:
        with torch.device("meta"):  # takes no memory
            model = build(config)
        model.load_state_dict(weights, assign=True)
    except (ValueError, RuntimeError, TypeError) as error:  # also sizes that no address can have
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{str(path)!r} does not fit its config: {reason}") from None
    join_weights(model)
    return model.requires_grad_(True)


def load_finite(folder: str | Path, device: torch.device | str = "cpu") -> Model:
    """Does what `load` does, and rejects NaN and infinite weights."""
    model = load(folder, device)
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise ValueError(
                f"{str(folder)!r}: tensor {name!r} holds NaN or infinity; train the model again"
            )
    return model


def _find(folder: str | Path) -> Path:
    check_path("folder", folder)
    found = pretrained.find(folder)
    if not found.exists():
        shipped = ", ".join(map(repr, pretrained.names())) or "none in this version"
        raise ValueError(
            f"{str(found)!r} does not exist; use a run folder, a folder written by vssm.save, or a "
            f"shipped model ({shipped})"
        )
    return found


def check_target(folder: Path) -> None:
    """Raises if a model cannot be saved there: where a file is, or over a run, or over the
    config.json of another program."""
    check_folder("folder", folder)
    try:
        values = read_object(folder / "config.json")
    except (OSError, ValueError):  # it is absent or damaged
        return
    if "data" in values or "train" in values or "model" not in values:
        raise ValueError(
            f"folder={str(folder)!r} is a run or has a config.json of another program, which would"
            " be lost; use a new folder, or one written by vssm.save"
        )
