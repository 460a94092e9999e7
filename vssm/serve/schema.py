"""The fields of requests and answers, and how prompts become tensors.

A prompt comes as nested lists, as a .npy file in base64, or as text. Lists and files are arrays by
the time a request is validated (`body`).
"""

import difflib
import json
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError
from torch import Tensor

from vssm.serve.errors import Refused
from vssm.serve.models import Served

__all__ = [
    "ErrorReply",
    "GenerateRequest",
    "ModelsReply",
    "ObserveReply",
    "ObserveRequest",
    "Reply",
    "ResumeRequest",
    "read_request",
    "read_sequences",
]

_INT64 = 2**63
_LONGEST = 64  # characters of a name or value that an error repeats


def _check_array(value: object) -> object:
    if isinstance(value, np.ndarray | str | None):
        return value
    raise PydanticCustomError("array", "input should be nested lists of numbers, or text")


def _check_file(value: object) -> object:
    if isinstance(value, np.ndarray | None):
        return value
    raise PydanticCustomError("npy", "input should be a .npy file in base64")


_Array = Annotated[
    Any,
    AfterValidator(_check_array),
    WithJsonSchema({"anyOf": [{"type": kind} for kind in ("array", "string", "null")]}),
    Field(
        description="(steps, features) or (batch, steps, features); for tokens (steps) or "
        "(batch, steps); for a model of text also a text."
    ),
]
_Npy = Annotated[
    Any,
    AfterValidator(_check_file),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]}),
    Field(description="The same as a .npy file in base64."),
]
_Count = Annotated[int, Field(ge=1)]
_Resume = Annotated[str, Field(min_length=2, description="`resume` of an answer.")]


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

    prompt: _Array = None
    prompt_npy: _Npy = None


class ResumeRequest(_MakeRequest):
    """Continues where an answer stopped; the same place can be resumed many times."""

    resume: _Resume


class ObserveRequest(_Request):
    """Reads data and returns where to resume; `resume` adds more data to earlier data."""

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


class ModelReply(BaseModel):
    """A served model."""

    name: str
    kind: str
    head: str
    features: int
    tokens: bool
    text: bool
    parallel: bool
    length: int
    parameters: int
    data: str | None
    image_shape: list[int] | None


class ModelsReply(BaseModel):
    """The served models, the default first, and the limits of one request."""

    models: list[ModelReply]
    limits: dict[str, int]


class ErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str
    param: str | None


class ErrorReply(BaseModel):
    """The one form of every error."""

    error: ErrorDetail


Request = TypeVar("Request", bound=_Request)


def read_request(kind: type[Request], fields: Any) -> Request:  # noqa: ANN401
    """Returns a valid request, or refuses it and names the first wrong field.

    Example:
        >>> read_request(ResumeRequest, {"resum": "h.1"})
        Traceback (most recent call last):
        vssm.serve.errors.Refused: resume is missing
        >>> read_request(GenerateRequest, {"num": 0})
        Traceback (most recent call last):
        vssm.serve.errors.Refused: num=0 is not allowed: input should be greater than or equal to 1
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if not first["loc"]:
        raise Refused(422, "invalid", "the body is not an object; allowed: a JSON object of fields")
    name, value = str(first["loc"][0]), first["input"]
    if first["type"] == "missing":
        message = f"{name} is missing"
    elif name not in kind.model_fields:
        nearest = difflib.get_close_matches(name, kind.model_fields, n=1)
        hint = f" (did you mean {nearest[0]}?)" if nearest else ""
        name, allowed = name[:_LONGEST], ", ".join(kind.model_fields)
        message = f"field {name!r} is unknown; allowed: {allowed}{hint}"
    else:
        repeat = not isinstance(value, list | dict) and len(str(value)) <= _LONGEST
        given = f"={json.dumps(value)}" if repeat else ""
        message = f"{name}{given} is not allowed: {first['msg'][0].lower()}{first['msg'][1:]}"
    raise Refused(422, "invalid", message, name)


def read_sequences(
    served: Served, value: np.ndarray | str | None, npy: np.ndarray | None, name: str
) -> Tensor | None:
    """Turns a prompt into what the model reads, (B, C, D) or (B, C), or refuses it."""
    if value is not None and npy is not None:
        message = f"{name} and {name}_npy were both given; allowed: one of them"
        raise Refused(422, "invalid", message, name)
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
        raise Refused(422, "invalid", str(error), name) from None
    return x


def _to_tensor(array: np.ndarray, tokens: bool, name: str) -> Tensor:
    if not array.size:
        raise ValueError(f"{name} is empty; allowed: one step or more, or to leave it out")
    if tokens and (array.dtype.kind == "f" or array.min() < 0 or array.max() >= _INT64):
        raise ValueError(f"{name} does not hold tokens; allowed: whole numbers from 0 on")
    with np.errstate(over="ignore"):  # a value that is too large becomes infinite and is refused
        return torch.from_numpy(array.astype(np.int64 if tokens else np.float32))
