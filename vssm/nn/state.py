"""The state of a sequence model: what it must remember to go on, and nothing else.

A `State` is a tree of tensors whose first dimension is the batch, plus the position, the number of
steps that were read. Blocks, stacks and models all return one, nested: a Mamba block keeps `conv`
(B, d_conv - 1, D) and `ssm` (B, D, N); an attention block `k` and `v` (B, heads, steps, size); a
GRU block `h` (B, width). Functions return new states and leave the old ones usable, so a state can
be continued many times.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vssm.checks import check_device, shown, whole_number
from vssm.nn.show import html_table
from vssm.noise import fork
from vssm.storage import check_checksum, with_checksum, write_atomically

__all__ = ["State"]

_FORMAT = "vssm-state-1"
_SHOWN = 2  # tensors
_DEEPEST = 16  # states in one another, in a file; those of the models are four


@dataclass(frozen=True, slots=True, eq=False)  # tensors have no single answer to ==
class State:
    """Creates a state from named tensors (batch first) and nested states.

    Tensors may be views that rows or states share: they are not to be written to.

    Example:
        >>> state = State({"h": torch.arange(3.0)[:, None]}, position=7)
        >>> state.batch, state.select([2, 0])["h"].flatten()
        (3, tensor([2., 0.]))
        >>> state.repeat(2)["h"].flatten()
        tensor([0., 0., 1., 1., 2., 2.])
        >>> state
        State(position=7, h (3, 1))
    """

    children: dict[str, "Tensor | State"]
    """Tensors and nested states by name."""
    position: int = 0
    """The number of steps read so far."""
    owner: str = ""
    """The model that this state belongs to, in words; empty below the model."""

    def __repr__(self) -> str:
        """Names the first tensors by their shapes: numbers would fill the screen."""
        parts = [f"{name} {shape}" for name, shape in self._shapes().items()]
        shown = parts[:_SHOWN] + [f"and {len(parts) - _SHOWN} more"] * (len(parts) > _SHOWN)
        return f"State({', '.join([f'position={self.position}', *shown])})"

    def _repr_html_(self) -> str:
        return html_table(f"State at position {self.position}", self._shapes())

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        tensors: dict[str, Tensor] = {}
        self._flatten("", tensors, {})
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        child = self.children[name]
        assert isinstance(child, Tensor)
        return child

    def child(self, name: str) -> "State":
        """Returns the nested state of that name."""
        child = self.children[name]
        assert isinstance(child, State)
        return child

    def leaves(self) -> Iterator[Tensor]:
        """Yields every tensor of the tree."""
        for child in self.children.values():
            if isinstance(child, State):
                yield from child.leaves()
            else:
                yield child

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return next(self.leaves()).shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(self.leaves()).device

    def map(self, function: Callable[[Tensor], Tensor]) -> "State":
        """Returns a state with the function applied to every tensor."""
        children = {
            name: child.map(function) if isinstance(child, State) else function(child)
            for name, child in self.children.items()
        }
        return State(children, self.position, self.owner)

    def detach(self) -> "State":
        """Cuts the graph: gradients stop here."""
        return self.map(Tensor.detach)

    def to(self, device: torch.device | str) -> "State":
        """Moves all tensors to a device; none is cast, since seeds and rows are whole numbers."""
        found = check_device(device)
        return self.map(lambda tensor: tensor.to(found))

    def select(self, index: "Tensor | list[int]") -> "State":
        """Picks, reorders or repeats batch rows; each row keeps its own noise."""
        try:
            given = torch.as_tensor(index)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ValueError(
                f"index={shown(index)} is not allowed; allowed: row numbers below {self.batch}"
            ) from None
        if given.numel() and (given.dtype.is_floating_point or given.dtype == torch.bool):
            dtype = str(given.dtype).removeprefix("torch.")
            raise ValueError(
                f"index is {dtype}; allowed: row numbers, as mask.nonzero().flatten() gives them"
            )
        rows = given.to(self.device, torch.int64)
        if rows.ndim != 1 or (
            rows.numel() and not (-self.batch <= rows.min() and rows.max() < self.batch)
        ):
            raise ValueError(
                f"index={rows.tolist()} does not fit; allowed: row numbers below {self.batch}"
            )
        return self.map(lambda tensor: tensor[rows])

    def repeat(self, times: int) -> "State":
        """Repeats every row `times` times, next to each other; every copy gets noise of its own.

        The copies continue differently, from one another, from the row itself and from the copies
        of any other row (`vssm.noise.fork`). Copies are numbered: copy c is the same in every call
        on this state. Copies share what the row has read: a vssm, tvae or vrnn has drawn its
        latents once for all of them. `observe(..., num=times)` draws them for every copy.
        """
        times = whole_number("times", times, 1)
        state = self.map(lambda tensor: tensor.repeat_interleave(times, 0))
        if "row" in state.children:
            state.children["row"] = fork(self["row"], times).flatten()
        return state

    @classmethod
    def cat(cls, states: "Sequence[State]") -> "State":
        """Joins states of one model at one position along the batch; each row keeps its own noise.

        Example:
            >>> a = State({"h": torch.zeros(1, 2)}, position=3)
            >>> b = State({"h": torch.ones(2, 2)}, position=3)
            >>> State.cat([a, b])["h"].sum(1)
            tensor([0., 2., 2.])
        """
        if isinstance(states, State) or not states:
            given = "one State, no list" if states else "empty"
            raise ValueError(f"states is {given}; allowed: a list of one State or more")
        for state in states:
            if not isinstance(state, State):
                raise ValueError(f"states has a {type(state).__name__}; allowed: one State or more")
        first = states[0]
        for other in states[1:]:
            if (other.position, other.owner) != (first.position, first.owner):
                raise ValueError(
                    f"states are at positions {first.position} and {other.position} of models "
                    f"{first.owner!r} and {other.owner!r}; allowed: one position of one model"
                )
            if other.children.keys() != first.children.keys():
                raise ValueError(
                    f"states hold {sorted(first.children)} and {sorted(other.children)}; "
                    "allowed: equal names"
                )
        children: dict[str, Tensor | State] = {}
        for name, child in first.children.items():
            if isinstance(child, State):
                children[name] = cls.cat([state.child(name) for state in states])
            else:
                parts = [state[name] for state in states]
                shapes = {tuple(part.shape[1:]) for part in parts}
                if len(shapes) > 1:  # for example latents that speak for steps to come
                    raise ValueError(
                        f"states differ in {name!r}, {sorted(shapes)}; "
                        "allowed: states that began at one position"
                    )
                children[name] = torch.cat(parts)
        return cls(children, first.position, first.owner)

    def expand(self, num: int) -> "State":
        """Views a state of one row as one of `num` equal rows, without copying."""
        if self.batch not in (1, num):
            raise ValueError(
                f"num={num} does not fit a state of {self.batch} rows; allowed: a state of one row"
            )
        return self.map(lambda tensor: tensor.expand(num, *tensor.shape[1:]))

    def save(self, path: str | Path) -> None:
        """Writes the state to a safetensors file, atomically."""
        content = self.to_bytes()
        write_atomically(path, lambda file: file.write_bytes(content))

    def to_bytes(self) -> bytes:
        """Returns what `save` writes: a safetensors file."""
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        positions: dict[str, int] = {}
        self._flatten("", tensors, positions)
        metadata = {"format": _FORMAT, "owner": self.owner, "positions": json.dumps(positions)}
        leaves = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        return save(leaves, with_checksum(leaves, metadata))

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> "State":
        """Reads a state that `save` wrote; refuses a damaged, foreign or non-finite file."""
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise ValueError(f"state file {str(path)!r} does not exist")
        device = check_device(device)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"state file {str(path)!r} is damaged: {error}") from None
        return cls._from_file(f"file {str(path)!r}", metadata, tensors).to(device)

    @staticmethod
    def is_saved_at(path: str | Path) -> bool:
        """Says whether there is a file that `save` wrote; only its header is read.

        Example:
            >>> State.is_saved_at("weights.safetensors")
            False
        """
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            return False
        try:
            with safe_open(path, framework="pt") as file:
                return (file.metadata() or {}).get("format") == _FORMAT
        except SafetensorError:
            return False

    @classmethod
    def from_bytes(cls, content: bytes, device: torch.device | str = "cpu") -> "State":
        """Reads what `to_bytes` gave.

        Example:
            >>> state = State({"h": torch.ones(1, 2)}, position=3)
            >>> State.from_bytes(state.to_bytes()).position
            3
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        device = check_device(device)
        try:
            tensors = load(content)
        except SafetensorError as error:
            raise ValueError(f"state of {len(content)} bytes is damaged: {error}") from None
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return cls._from_file("state", header.get("__metadata__", {}), tensors).to(device)

    @classmethod
    def _from_file(
        cls, name_of_file: str, metadata: dict[str, str], tensors: dict[str, Tensor]
    ) -> "State":
        if metadata.get("format") != _FORMAT:
            raise ValueError(
                f"{name_of_file} has format {metadata.get('format')!r}; "
                f"allowed: {_FORMAT!r}, a saved state"
            )
        check_checksum(name_of_file, tensors, metadata)
        try:
            positions = json.loads(metadata["positions"])
            assert all(type(position) is int and position >= 0 for position in positions.values())
            assert all(name.count("/") < _DEEPEST for name in positions)
            root = cls({}, positions[""], metadata["owner"])
            nodes = {"": root}
            for name in sorted(positions, key=lambda name: name.count("/")):
                if name:
                    parent, _, leaf = name.rpartition("/")
                    nodes[name] = cls({}, positions[name])
                    nodes[parent].children[leaf] = nodes[name]
            for name, tensor in sorted(tensors.items()):  # a file has them in any order
                parent, _, leaf = name.rpartition("/")
                nodes[parent].children[leaf] = tensor
        except (AssertionError, AttributeError, KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"{name_of_file} is damaged: {error!r} in its positions") from None
        if not tensors or not tensors.keys().isdisjoint(nodes):
            raise ValueError(
                f"{name_of_file} is damaged: it has {'names twice' if tensors else 'no tensors'}"
            )
        rows = {tensor.shape[:1] for tensor in tensors.values()}
        if len(rows) > 1 or () in rows:
            raise ValueError(
                f"{name_of_file} is damaged: its tensors are not all of one number of rows"
            )
        for name, tensor in tensors.items():
            if tensor.itemsize > 1 and not tensor.isfinite().all():
                raise ValueError(
                    f"{name_of_file} holds NaN or infinity in {name!r}; "
                    "resume from a state that is finite"
                )
        return root

    def _flatten(self, prefix: str, tensors: dict[str, Tensor], positions: dict[str, int]) -> None:
        positions[prefix] = self.position
        for name, child in self.children.items():
            path = f"{prefix}/{name}" if prefix else name
            if isinstance(child, State):
                child._flatten(path, tensors, positions)
            else:
                tensors[path] = child
