"""The fields of requests, and how their sequences become tensors.

A sequence comes as nested lists or as text. pydantic checks the fields and turns lists into arrays;
the functions below check arrays and text against a model.
"""

import json
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError
from torch import Tensor

from vssm.data import Meta
from vssm.models import AnyPart
from vssm.objectives.parts import there_and_finite
from vssm.sampling.filling import check_given
from vssm.serve.errors import Refused, invalid
from vssm.serve.models import Served

_INT64 = 2**63
_LONGEST = 64  # characters of a name or value that an error repeats


def _from_lists(value: object) -> object:
    """Returns an array for nested lists of numbers, with NaN for null; text passes."""
    if isinstance(value, str):
        return value
    try:
        # As objects first: numpy would make every string of a list as long as the longest.
        leaves = np.array(value if isinstance(value, list) else {}, object)
        if leaves.ndim <= 3 and {type(leaf) for leaf in leaves.flat} <= {int, float, type(None)}:
            return leaves.astype(np.float64)
    except (ValueError, OverflowError):
        pass
    message = "input should be nested lists of numbers, equally long, or text"
    raise PydanticCustomError("array", message)


_Sequences = Annotated[
    Any,
    BeforeValidator(_from_lists),
    WithJsonSchema({"anyOf": [{"type": "array"}, {"type": "string"}]}),
]
_SHAPES = (
    "(steps, features) or (batch, steps, features); for tokens (steps) or (batch, steps); "
    "for a model of text also a text."
)
_Count = Annotated[int, Field(ge=1)]
_Temperature = Annotated[float, Field(ge=1e-30, le=100, description="Below 1: safer samples.")]
_Observe = Annotated[Literal["mean", "sample"], Field(description="The head's mean or a sample.")]
_Resume = Annotated[str, Field(min_length=2, description="`resume` of an answer.")]
_Keep = Annotated[
    Literal["server", "none"],
    Field(description="Where the state waits to be resumed: in the server, or nowhere."),
]


def examples(*values: dict[str, Any]) -> ConfigDict:
    """Returns the settings of a request: its examples, no conversion and no unknown field."""
    return ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": list(values)})


class _Request(BaseModel):
    model: str | None = Field(
        None,
        max_length=_LONGEST,
        description="One of /v1/models; by default the model of `resume`, or the first that "
        "can do what is asked.",
    )
    num: _Count | None = Field(
        None, description="How many sequences. One prompt serves any number, as does one sample."
    )
    # Negative seeds too, as in Python: programs often make seeds by hashing.
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = Field(
        None, description="Selects the sample: any 64-bit whole number."
    )


class _MakeRequest(_Request):
    keep: _Keep = "server"
    length: _Count | None = Field(
        None, description="How many new steps; by default the rest of a sequence of the data."
    )
    chunk: _Count | None = Field(
        None,
        description="Generate this many steps at a time; for a step-by-step model the steps in an "
        "event of a stream, 1 by default.",
    )
    recondition: bool = Field(False, description="Read each chunk before the next (vssm, tvae).")
    temperature: _Temperature = 1.0
    observe: _Observe = "mean"
    stream: bool = Field(False, description="Send chunks as they are made (server-sent events).")


class GenerateRequest(_MakeRequest):
    model_config: ClassVar[ConfigDict] = examples(
        {"num": 16, "seed": 7}, {"length": 12, "stream": True}
    )
    prompt: _Sequences | None = Field(None, description=_SHAPES)


class ResumeRequest(_MakeRequest):
    model_config: ClassVar[ConfigDict] = examples({"resume": "RESUME_OF_AN_ANSWER", "length": 12})
    resume: _Resume


class ObserveRequest(_Request):
    model_config: ClassVar[ConfigDict] = examples({"x": [[0.5, 0.25]], "num": 4})
    resume: _Resume | None = None
    keep: _Keep = "server"
    x: _Sequences = Field(description=_SHAPES)


class FillRequest(_Request):
    model_config: ClassVar[ConfigDict] = examples(
        {"model": "NAME", "x": [[0.5, None], [None, None]], "passes": 4}
    )
    passes: _Count = Field(1, description="Parallel passes; several fill one part after the other.")
    temperature: _Temperature = 1.0
    observe: _Observe = "mean"
    x: _Sequences = Field(description=f"{_SHAPES} A gap is null, in text _.")


def explain(error: RequestValidationError) -> Refused:
    """Returns the refusal of a request that pydantic refused: it names the first wrong field."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return Refused(400, "not_json", "the body is not valid JSON; send a JSON object")
    if len(first["loc"]) < 2:
        return invalid("the body is not an object; send a JSON object of fields")
    name, value, message = str(first["loc"][1])[:_LONGEST], first["input"], first["msg"]
    if first["type"] == "missing":
        return invalid(f"{name} is missing", name)
    if first["type"] == "extra_forbidden":
        return invalid(f"field {name!r} is unknown; /docs lists the fields", name)
    repeat = not isinstance(value, list | dict) and len(str(value)) <= _LONGEST
    given = f"={json.dumps(value)}" if repeat else ""
    return invalid(f"{name}{given} is not allowed: {message[0].lower()}{message[1:]}", name)


def read_sequences(served: Served, value: np.ndarray | str, name: str) -> Tensor:
    """Turns sequences into what the model reads, (B, C, D) or (B, C), or refuses them."""
    try:
        is_text = isinstance(value, str)
        x = _text_of(served, name).encode(value) if is_text else _to_tensor(served, value, name)
        x = x[None] if x.dim() == (1 if served.model.head.tokens else 2) else x
        served.model.head.validate(x, name=name)
    except ValueError as error:
        raise invalid(str(error), name) from None
    return x


def read_gaps(served: Served, value: np.ndarray | str) -> tuple[Tensor, Tensor]:
    """Turns sequences with gaps into tensors, and masks of what is known, or refuses them."""
    model = served.model
    if not served.fills:
        message = f"model {served.name!r} continues sequences and cannot fill gaps; "
        raise invalid(message + "use a model trained with --model.known any", "model")
    assert isinstance(model, AnyPart)
    try:
        if isinstance(value, str):
            x, known = _text_of(served, "x").encode_gaps(value)
        else:
            known = torch.from_numpy(~np.isnan(value))
            x = _to_tensor(served, np.nan_to_num(value), "x")
        if x.dim() == (1 if model.head.tokens else 2):
            x, known = x[None], known[None]
        x, known = there_and_finite(model, x.to(served.device), known.to(served.device))
        check_given(model, known)
    except ValueError as error:
        raise invalid(str(error), "x") from None
    if known.all():
        raise invalid("nothing is unknown in x; mark gaps by null, in text by _", "x")
    return x.cpu(), known.cpu()


def _text_of(served: Served, name: str) -> Meta:
    if not served.text or served.meta is None:
        raise ValueError(f"{name} is text, but model {served.name!r} reads numbers")
    return served.meta


def _to_tensor(served: Served, array: np.ndarray, name: str) -> Tensor:
    if not array.size:
        raise ValueError(f"{name} is empty; give one step or more, or leave it out")
    tokens = served.model.head.tokens
    if tokens and not ((array >= 0) & (array < _INT64) & (array % 1 == 0)).all():
        raise ValueError(f"{name} does not hold tokens; use whole numbers from 0 on")
    with np.errstate(over="ignore"):  # a value that is too large becomes infinite and is refused
        return torch.from_numpy(array.astype(np.int64 if tokens else np.float32))
