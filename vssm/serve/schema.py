"""The fields of requests and answers, and how their sequences become tensors.

A sequence comes as nested lists, as a .npy file in base64, or as text. pydantic checks the fields
and turns lists and files into arrays; `read_sequences` checks arrays and text against a model.
"""

import base64
import io
import json
from typing import Annotated, Any, Literal

import numpy as np
import pydantic_core
import torch
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError
from torch import Tensor

from vssm.serve.errors import Refused, invalid
from vssm.serve.models import Served

__all__ = [
    "ErrorReply",
    "GenerateRequest",
    "ModelsReply",
    "ObserveReply",
    "ObserveRequest",
    "Reply",
    "ResumeRequest",
    "explain",
    "read_json",
    "read_sequences",
]

_INT64 = 2**63
_LONGEST = 64  # characters of a name or value that an error repeats
_MAX_FIELDS = 64
_MAX_HEADER = 4096  # bytes of the header of a .npy file


def read_json(body: bytes, max_lists: int, max_numbers: int) -> Any:  # noqa: ANN401
    """Parses the body of a request. One that is too large or too nested costs no memory.

    Example:
        >>> read_json(b'{"num": 2, "prompt": [[0, 1]]}', 10, 10)
        {'num': 2, 'prompt': [[0, 1]]}
    """
    for mark, most, what in ((b"[", max_lists, "lists"), (b",", max_numbers, "numbers")):
        if body.count(mark) > most:
            message = f"the body has too many {what}; allowed: at most {most}"
            raise Refused(422, "too_many", message)
    try:
        content = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError:
        message = "the body is not valid JSON; allowed: an object with finite numbers"
        raise Refused(400, "not_json", message) from None
    if isinstance(content, dict) and len(content) > _MAX_FIELDS:
        message = f"the body has {len(content)} fields; allowed: at most {_MAX_FIELDS}"
        raise Refused(422, "too_many", message)
    return content


def _from_lists(value: object) -> object:
    """Returns an array for nested lists of numbers; text and None pass."""
    if isinstance(value, str | None):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("array", "input should be nested lists of numbers, or text")
    try:
        # As objects first: numpy would make every string of a list as long as the longest.
        leaves = np.array(value, object)
        if leaves.ndim <= 3 and {type(leaf) for leaf in leaves.flat} <= {int, float}:
            array = np.array(value)
            if array.dtype.kind in "iuf":  # integers beyond 64 bits become objects
                return array
    except (ValueError, OverflowError):
        pass
    raise PydanticCustomError("array", "input should be nested lists of numbers, equally long")


def _from_file(value: object) -> object:
    """Returns the array of a .npy file in base64. Nothing is unpickled.

    Example:
        >>> file = io.BytesIO()
        >>> np.save(file, np.arange(3.0))
        >>> _from_file(base64.b64encode(file.getvalue()).decode())
        array([0., 1., 2.])
    """
    if value is None:
        return None
    try:
        assert isinstance(value, str)
        data = base64.b64decode(value, validate=True)
        file, npy = io.BytesIO(data), np.lib.format
        first = npy.read_magic(file)[0] == 1
        header = npy.read_array_header_1_0 if first else npy.read_array_header_2_0
        shape, fortran, dtype = header(file, max_header_size=_MAX_HEADER)
        assert len(shape) <= 3 and min(shape, default=0) >= 0 and dtype.kind in "iuf"
        array = np.frombuffer(data, dtype, offset=file.tell())
        return array.reshape(shape, order="F" if fortran else "C")
    except Exception:  # a hostile header can raise almost anything
        message = "input should be a .npy file in base64, numbers with 1 to 3 axes"
        raise PydanticCustomError("npy", message) from None


_Array = Annotated[
    Any,
    BeforeValidator(_from_lists),
    WithJsonSchema({"anyOf": [{"type": kind} for kind in ("array", "string", "null")]}),
    Field(
        description="(steps, features) or (batch, steps, features); for tokens (steps) or "
        "(batch, steps); for a model of text also a text."
    ),
]
_Npy = Annotated[
    Any,
    BeforeValidator(_from_file),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]}),
    Field(description="The same as a .npy file in base64."),
]
_Count = Annotated[int, Field(ge=1)]
_Resume = Annotated[str, Field(min_length=2, description="`resume` of an answer.")]


def _examples(*values: dict[str, Any]) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": list(values)})


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(
        None,
        max_length=_LONGEST,
        description="One of /v1/models; by default the first, or the model of `resume`.",
    )
    num: _Count | None = Field(
        None, description="How many sequences. One prompt serves any number, as does one sample."
    )
    # Negative seeds too, as in Python: programs often make seeds by hashing.
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = Field(
        None, description="Names the sample: any whole number of 64 bits."
    )
    keep: Literal["server", "client", "none"] | None = Field(
        None, description="Where the state waits: in the server, sealed in the answer, or nowhere."
    )


class _MakeRequest(_Request):
    length: _Count | None = Field(
        None, description="How many new steps; by default the rest of a sequence of the data."
    )
    chunk: _Count | None = Field(None, description="Make so many steps at a time (vssm, tvae).")
    recondition: bool = Field(False, description="Read each chunk before the next (vssm, tvae).")
    temperature: float = Field(1.0, ge=1e-30, le=100, description="Below 1: safer samples.")
    observe: Literal["mean", "sample"] = Field("mean", description="The head's mean or a sample.")
    stream: bool = Field(False, description="Send chunks as they are made (server-sent events).")
    every: _Count | None = Field(
        None, description="Steps in an event of a step-by-step model; 1 by default."
    )


class GenerateRequest(_MakeRequest):
    """Generates sequences, from nothing or after a prompt."""

    model_config = _examples({"num": 16, "seed": 7}, {"length": 12, "stream": True})
    prompt: _Array = None
    prompt_npy: _Npy = None


class ResumeRequest(_MakeRequest):
    """Continues where an answer stopped; the same place can be resumed many times."""

    model_config = _examples({"resume": "RESUME_OF_AN_ANSWER", "length": 12})
    resume: _Resume


class ObserveRequest(_Request):
    """Reads data and returns where to resume; `resume` adds more data to earlier data."""

    model_config = _examples({"x_npy": "BASE64_OF_A_NPY_FILE", "num": 4})
    x: _Array = None
    x_npy: _Npy = None
    resume: _Resume | None = None


class Timing(BaseModel):
    """Where the time went."""

    compute_ms: float = Field(description="In passes that this request was part of.")
    total_ms: float = Field(description="From the arrival of the request to this answer.")
    rows: int = Field(description="Sequences in the last pass, including other requests'.")


class ObserveReply(BaseModel):
    """Where to resume."""

    model: str
    position: int = Field(description="Steps read and made so far.")
    resume: str | None = Field(description="Pass it to /v1/resume.")
    timing: Timing


class Reply(ObserveReply):
    """The new steps, and where to resume."""

    x: list[Any] = Field(description="(num, length, features), or (num, length) tokens.")
    text: list[str] | None = Field(description="The same as text, for a model of text.")


class ModelsReply(BaseModel):
    """The served models, the default first, and the limits of one request."""

    models: list[dict[str, Any]]
    limits: dict[str, int]


class ErrorReply(BaseModel):
    """The one form of every error."""

    error: dict[Literal["type", "message", "param"], str | None]


def explain(error: RequestValidationError) -> Refused:
    """Returns the refusal of a request that pydantic refused: it names the first wrong field."""
    first = error.errors()[0]
    if len(first["loc"]) < 2:
        return invalid("the body is not an object; allowed: a JSON object of fields")
    name, value, message = str(first["loc"][1])[:_LONGEST], first["input"], first["msg"]
    if first["type"] == "missing":
        return invalid(f"{name} is missing", name)
    if first["type"] == "extra_forbidden":
        return invalid(f"field {name!r} is unknown; /docs lists the fields", name)
    repeat = not isinstance(value, list | dict) and len(str(value)) <= _LONGEST
    given = f"={json.dumps(value)}" if repeat else ""
    return invalid(f"{name}{given} is not allowed: {message[0].lower()}{message[1:]}", name)


def read_sequences(
    served: Served, value: np.ndarray | str | None, npy: np.ndarray | None, name: str
) -> Tensor | None:
    """Turns sequences into what the model reads, (B, C, D) or (B, C), or refuses them."""
    if value is not None and npy is not None:
        raise invalid(f"{name} and {name}_npy were both given; allowed: one of them", name)
    array, name = (value, name) if npy is None else (npy, f"{name}_npy")
    if array is None:
        return None
    head = served.model.head
    try:
        if not isinstance(array, str):
            x = _to_tensor(array, head.tokens, name)
        elif served.text and served.meta is not None:
            x = served.meta.encode(array)
        else:
            raise ValueError(f"{name} is text; allowed for model {served.name!r}: numbers")
        x = x[None] if x.dim() == (1 if head.tokens else 2) else x
        head.validate(x, name=name)
    except ValueError as error:
        raise invalid(str(error), name) from None
    return x


def _to_tensor(array: np.ndarray, tokens: bool, name: str) -> Tensor:
    if not array.size:
        raise ValueError(f"{name} is empty; allowed: one step or more, or to leave it out")
    if tokens and (array.dtype.kind == "f" or array.min() < 0 or array.max() >= _INT64):
        raise ValueError(f"{name} does not hold tokens; allowed: whole numbers from 0 on")
    with np.errstate(over="ignore"):  # a value that is too large becomes infinite and is refused
        return torch.from_numpy(array.astype(np.int64 if tokens else np.float32))
