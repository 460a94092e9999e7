"""What requests and answers look like, and how prompts become tensors.

A prompt comes as nested lists, as the bytes of a .npy file in base64, or as text. Lists and files are arrays
by the time a request is validated (`body`).
"""

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
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
    "mistake",
    "read_sequences",
]

_INT64 = 2**63
# All that `vssm.generate` takes: programs make seeds by hashes, half of them negative. Commands take those
# of training, from 0 on (vssm.cli.options.check_seed).
_Seed = Annotated[
    int,
    Field(
        ge=-_INT64,
        lt=_INT64,
        description="Names the sample: any whole number of 64 bits, as in Python.",
    ),
]
_Model = Annotated[
    str | None, Field(max_length=64, description="One of /v1/models; the first by default.")
]
_ItsModel = Annotated[
    str | None,
    Field(max_length=64, description="The model of `resume`, to be sure; another is refused."),
]
_Array = Annotated[
    np.ndarray | str | None,
    WithJsonSchema(
        {"anyOf": [{"type": "array", "items": {}}, {"type": "string"}, {"type": "null"}]}
    ),
    Field(
        description="(steps, features), or (batch, steps, features); for tokens (steps) or (batch, steps); "
        "for a model of text also a text."
    ),
]
_Npy = Annotated[
    np.ndarray | None,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]}),
    Field(description="The same as a .npy file in base64."),
]
_Keep = Annotated[
    Literal["server", "client", "none"] | None,
    Field(
        description="Where the state waits to be resumed: here, sealed in the answer, or not at all."
    ),
]
_Resume = Annotated[str, Field(min_length=2, description="`resume` of an answer.")]


# What each field takes, for who sent something else.
_COUNT, _FLAG, _ARRAY = "a whole number >= 1", "true or false", "nested lists of numbers, or a text"
_NPY, _LONGEST_NAME = "a .npy file in base64", 64
_ALLOWED = {
    "num": _COUNT,
    "length": _COUNT,
    "chunk": _COUNT,
    "every": _COUNT,
    "recondition": _FLAG,
    "stream": _FLAG,
    "temperature": "a number > 0, from 1e-30 to 100",
    "observe": "'mean' or 'sample'",
    "seed": "a whole number from -2^63 to 2^63 - 1",
    "keep": "'server', 'client' or 'none'",
    "model": "a name of /v1/models",
    "prompt": _ARRAY,
    "prompt_npy": _NPY,
    "x": _ARRAY,
    "x_npy": _NPY,
    "resume": "`resume` of an answer",
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)


class _Dials(_Strict):
    num: int | None = Field(
        None,
        ge=1,
        description="How many sequences; one prompt serves any number, and one state of a sample.",
    )
    length: int | None = Field(
        None,
        ge=1,
        description="How many new steps; the rest of a sequence as long as the training data's by default.",
    )
    chunk: int | None = Field(None, ge=1, description="Make so many steps at a time (vssm, tvae).")
    recondition: bool = Field(
        False, description="Read each chunk before making the next (vssm, tvae)."
    )
    temperature: float = Field(
        1.0, ge=1e-30, le=100, allow_inf_nan=False, description="Below 1: safer samples."
    )
    observe: Literal["mean", "sample"] = Field(
        "mean", description="The mean of the head, or a sample of it."
    )
    seed: _Seed | None = None
    stream: bool = Field(False, description="Send chunks as they are made, as server-sent events.")
    every: int | None = Field(
        None, ge=1, description="Steps of an event of a step-by-step model; 1 by default."
    )
    keep: _Keep = None


class GenerateRequest(_Dials):
    """Generates sequences, from nothing or after a prompt."""

    model: _Model = None
    prompt: _Array = None
    prompt_npy: _Npy = None


class ResumeRequest(_Dials):
    """Goes on from where an answer stopped."""

    model: _ItsModel = None
    resume: _Resume


class ObserveRequest(_Strict):
    """Reads data, and returns where to resume from."""

    model: _Model = None
    num: int | None = Field(
        None,
        ge=1,
        description="How many sequences to resume; each draws latents of its own for one row of data.",
    )
    x: _Array = None
    x_npy: _Npy = None
    resume: _Resume | None = None
    seed: _Seed | None = None
    keep: _Keep = None


class Timing(BaseModel):
    """Where the time went."""

    compute_ms: float = Field(description="In passes that this request was part of.")
    total_ms: float = Field(description="From the arrival of the request to this answer.")
    rows: int = Field(
        description="Sequences in the last of these passes, those of other requests included."
    )


class ObserveReply(BaseModel):
    """Where to resume from."""

    model: str
    position: int = Field(description="Steps read and made so far.")
    resume: str | None = Field(description="Pass it to /v1/resume.")
    timing: Timing


class Reply(ObserveReply):
    """The new steps, and where to resume from."""

    x: list[Any] = Field(
        description="The new steps, (num, length, features), or (num, length) tokens."
    )
    text: list[str] | None = Field(description="The same as text, for a model of text.")


class ModelReply(BaseModel):
    """A model that is served."""

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
    """What is served, the default first, and what one request may ask for."""

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


def mistake(ask: type[BaseModel], error: Mapping[str, Any]) -> tuple[str, str | None]:
    """Says in one line what is wrong with a request, and in which field.

    Arguments:
        ask: What was expected.
        error: What pydantic says; its words are for programmers, and only where it is is taken.

    Example:
        >>> mistake(ResumeRequest, {"type": "extra_forbidden", "loc": ("body", "resum"), "input": ""})[0]
        "field 'resum' is unknown; allowed: num, length, ..., model, resume (did you mean resume?)"
        >>> mistake(GenerateRequest, {"type": "int_type", "loc": ("body", "num"), "input": 1.5})
        ('num=1.5 is not allowed; allowed: a whole number >= 1', 'num')
    """
    fields, place = ask.model_fields, error["loc"][1:2]
    if not place:
        return "the body is no object; allowed: a JSON object of fields", None
    name = str(place[0])
    if name not in fields:
        nearest = difflib.get_close_matches(name, fields, n=1)
        hint = f" (did you mean {nearest[0]}?)" if nearest else ""
        name = name[:_LONGEST_NAME]
        return f"field {name!r} is unknown; allowed: {', '.join(fields)}{hint}", name
    value = error["input"]
    if error["type"] == "missing":
        what = f"{name} is missing"
    elif isinstance(value, list | dict) or len(str(value)) > _LONGEST_NAME:  # too much to repeat
        what = f"{name} is not allowed"
    else:
        what = f"{name}={json.dumps(value)} is not allowed"
    return f"{what}; allowed: {_ALLOWED[name]}", name


def read_sequences(
    served: Served, value: np.ndarray | str | None, npy: np.ndarray | None, name: str
) -> Tensor | None:
    """Turns a prompt into what the model reads, (B, C, D) or (B, C), or refuses it."""
    array = npy if value is None else value
    if array is None:
        return None
    head, name = served.model.head, name if npy is None else f"{name}_npy"
    try:
        if isinstance(array, str):
            if not served.text or served.meta is None:
                raise ValueError(f"{name} is text; allowed for model {served.name!r}: numbers")
            x = served.meta.encode(array)
        else:
            x = _to_tensor(array, head.tokens, name)
        x = x[None] if x.dim() == (1 if head.tokens else 2) else x
        head.validate(x, name=name)
    except ValueError as error:
        raise Refused(422, "invalid", str(error), name) from None
    return x


def _to_tensor(array: np.ndarray, tokens: bool, name: str) -> Tensor:
    if not array.size:
        raise ValueError(f"{name} is empty; allowed: one step or more, or to leave it out")
    if tokens and array.dtype.kind == "f":
        raise ValueError(f"{name} has dtype {array.dtype}; allowed: whole numbers")
    if tokens and array.size and not (array.min() >= 0 and array.max() < _INT64):
        raise ValueError(
            f"{name} holds numbers that are no tokens; allowed: whole numbers from 0 on"
        )
    with np.errstate(over="ignore"):  # too large becomes infinite, which the head refuses
        array = array.astype(np.int64 if tokens else np.float32)
    return torch.from_numpy(array)
