"""The state of a sequence model: everything that it must remember to continue, and nothing else.

A `State` is a tree of tensors whose first dimension is the batch, plus the position, the number of
steps that were read. Blocks, stacks and models all return a state; the states are nested. A Mamba
block keeps `conv` (B, d_conv - 1, D) and `ssm` (B, D, N), an attention block `k` and `v` (B, heads,
steps, size), a GRU block `h` (B, width). Functions return new states and leave the old ones usable,
so a state can be continued many times.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vssm.checks import check_device, shown, whole_number, whole_numbers
from vssm.data.storage import write_atomically
from vssm.nn.show import html_table
from vssm.nn.state_file import is_packed_at, pack, unpack
from vssm.noise import fork

_SHOWN = 2  # tensors


@dataclass(frozen=True, slots=True, eq=False)  # tensors have no single answer to ==
class State:
    """Creates a state from named tensors (batch first) and nested states.

    Tensors may be views that rows or states share: do not write to them.

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
        return {name: tuple(tensor.shape) for name, tensor in self.flatten()[0].items()}

    def __getitem__(self, name: str) -> Tensor:
        child = self.children.get(name)
        if not isinstance(child, Tensor):
            raise ValueError(f"state has no tensor {name!r}; use a state from generate or observe")
        return child

    def child(self, name: str) -> "State":
        """Returns the nested state of that name."""
        child = self.children.get(name)
        if not isinstance(child, State):
            raise ValueError(
                f"state has no nested state {name!r}; use a state from generate or observe"
            )
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
        """Picks, reorders or repeats rows of the batch; each row keeps its own noise."""
        rows = whole_numbers("index", index, self.device)
        if rows.ndim != 1 or bool(((rows < -self.batch) | (rows >= self.batch)).any()):
            raise ValueError(f"index is {shown(index)}; it must hold rows below {self.batch}")
        return self.map(lambda tensor: tensor[rows])

    def repeat(self, times: int) -> "State":
        """Repeats every row `times` times, next to each other; every copy gets noise of its own.

        The copies continue differently from one another, from the row itself and from the copies of
        any other row (`vssm.noise.fork`). Copies are numbered: copy c is the same in every call on
        this state. Copies share the past of the row: a vssm, tvae or vrnn has drawn its latents
        once for all of them. `observe(..., num=times)` draws them for every copy.
        """
        times = whole_number("times", times, 1)
        state = self.map(lambda tensor: tensor.repeat_interleave(times, 0))
        if "row" in state.children:
            state.children["row"] = fork(self["row"], times).flatten()
        return state

    @classmethod
    def cat(cls, states: "Sequence[State]") -> "State":
        """Joins states along the batch; each row keeps its own noise.

        The states must be of one model, and at the same position.

        Example:
            >>> a = State({"h": torch.zeros(1, 2)}, position=3)
            >>> b = State({"h": torch.ones(2, 2)}, position=3)
            >>> State.cat([a, b])["h"].sum(1)
            tensor([0., 2., 2.])
        """
        several = not isinstance(states, State) and len(states) > 0
        if not several or not all(isinstance(state, State) for state in states):
            raise ValueError(f"states is {shown(states)}; it must be a list of one State or more")
        first = states[0]
        for other in states[1:]:
            if (other.position, other.owner) != (first.position, first.owner):
                raise ValueError(
                    f"states are at positions {first.position} and {other.position} of models "
                    f"{first.owner!r} and {other.owner!r}; "
                    "join states of one model at the same position"
                )
            if other.children.keys() != first.children.keys():
                raise ValueError(
                    f"states hold {sorted(first.children)} and {sorted(other.children)}; "
                    "join states with the same names"
                )
        children: dict[str, Tensor | State] = {}
        for name, child in first.children.items():
            if isinstance(child, State):
                children[name] = cls.cat([state.child(name) for state in states])
            else:
                parts = [state[name] for state in states]
                shapes = {tuple(part.shape[1:]) for part in parts}
                if len(shapes) > 1:  # for example latents that cover steps to come
                    raise ValueError(
                        f"states have {name!r} of shapes {sorted(shapes)}; "
                        "join states that began at the same position"
                    )
                children[name] = torch.cat(parts)
        return cls(children, first.position, first.owner)

    def expand(self, num: int) -> "State":
        """Views a state of one row as one of `num` equal rows, without copying."""
        if self.batch == num:
            return self
        if self.batch != 1:
            raise ValueError(f"num={num} does not fit {self.batch} rows; use a state of one row")
        return self.map(lambda tensor: tensor.expand(num, *tensor.shape[1:]))

    def save(self, path: str | Path) -> None:
        """Writes the state to a safetensors file, atomically."""
        content = self.to_bytes()
        write_atomically(path, lambda file: file.write_bytes(content))

    def to_bytes(self) -> bytes:
        """Returns the content of the safetensors file that `save` writes."""
        return pack(self)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> "State":
        """Reads a state that `save` wrote; refuses a damaged, foreign or non-finite file."""
        if not Path(path).is_file():
            raise ValueError(f"{str(path)!r} is not a file; give a state that was saved")
        return unpack(cls, Path(path).read_bytes(), f"file {str(path)!r}").to(device)

    @classmethod
    def from_bytes(cls, content: bytes, device: torch.device | str = "cpu") -> "State":
        """Reads a state from the bytes that `to_bytes` returned.

        Example:
            >>> state = State({"h": torch.ones(1, 2)}, position=3)
            >>> State.from_bytes(state.to_bytes()).position
            3
        """
        return unpack(cls, content, "state").to(device)

    @staticmethod
    def is_saved_at(path: str | Path) -> bool:
        """Says whether there is a file that `save` wrote; only its header is read.

        Example:
            >>> State.is_saved_at("weights.safetensors")
            False
        """
        return is_packed_at(Path(path))

    def flatten(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Returns all tensors, and the positions of all nested states, by their paths.

        Example:
            >>> State({"stack": State({"h": torch.ones(1)}, 3)}, 3).flatten()
            ({'stack/h': tensor([1.])}, {'': 3, 'stack': 3})
        """
        tensors: dict[str, Tensor] = {}
        positions = {"": self.position}
        for name, child in self.children.items():
            if isinstance(child, State):
                below, at = child.flatten()
                tensors |= {f"{name}/{path}": tensor for path, tensor in below.items()}
                positions |= {f"{name}/{path}".rstrip("/"): place for path, place in at.items()}
            else:
                tensors[name] = child
        return tensors, positions
