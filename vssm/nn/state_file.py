"""States as safetensors files: tensors under their paths, positions and owner in the metadata.

A file may be damaged, of another program, or forged. `unpack` says what is wrong with it and never
returns half a state.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from vssm.data.storage import check_checksum, with_checksum

if TYPE_CHECKING:
    from vssm.nn.state import State

_FORMAT = "vssm-state-1"
_ADVICE = "give a whole file that a state was saved to"
_DEEPEST = 16  # levels of nested states; the models have four


def pack(state: "State") -> bytes:
    """Returns a state as the content of a safetensors file."""
    from safetensors.torch import save

    tensors, positions = state.flatten()
    metadata = {"format": _FORMAT, "owner": state.owner, "positions": json.dumps(positions)}
    leaves = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(leaves, with_checksum(leaves, metadata))


def is_packed_at(path: Path) -> bool:
    """Says whether there is a file that holds a state; only its header is read."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("format") == _FORMAT
    except SafetensorError:
        return False


def unpack(cls: "type[State]", content: bytes, name: str) -> "State":
    """Returns the state that `pack` wrote.

    Arguments:
        cls: The class `State`.
        content: The content of the file.
        name: The name of the file in messages.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
    except SafetensorError as error:
        raise ValueError(f"{name} is damaged: {error}; {_ADVICE}") from None
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata = header.get("__metadata__", {})
    if metadata.get("format") != _FORMAT:
        raise ValueError(
            f"{name} has format {metadata.get('format')!r}; it must be {_FORMAT!r}; {_ADVICE}"
        )
    check_checksum(name, tensors, metadata)
    try:
        root = _tree(cls, tensors, json.loads(metadata["positions"]), metadata["owner"])
    except (AssertionError, AttributeError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} is damaged: {error!r} in its positions; {_ADVICE}") from None
    rows = {tensor.shape[:1] for tensor in tensors.values()}
    if len(rows) > 1 or () in rows:
        message = f"{name} is damaged: its tensors do not have the same number of rows; {_ADVICE}"
        raise ValueError(message)
    for path, tensor in tensors.items():
        if tensor.itemsize > 1 and not tensor.isfinite().all():
            raise ValueError(
                f"{name} holds NaN or infinity in {path!r}; resume from a finite state"
            )
    return root


def _tree(
    cls: "type[State]", tensors: dict[str, Tensor], positions: dict[str, int], owner: str
) -> "State":
    assert all(type(position) is int and position >= 0 for position in positions.values())
    assert all(path.count("/") < _DEEPEST for path in positions)
    assert tensors and tensors.keys().isdisjoint(positions), "no tensors, or names twice"
    nodes = {"": cls({}, positions[""], owner)}
    for path in sorted(positions.keys() - {""}, key=lambda path: path.count("/")):
        parent, _, leaf = path.rpartition("/")
        nodes[path] = nodes[parent].children[leaf] = cls({}, positions[path])
    for path, tensor in sorted(tensors.items()):  # a file has them in any order
        parent, _, leaf = path.rpartition("/")
        nodes[parent].children[leaf] = tensor
    return nodes[""]
