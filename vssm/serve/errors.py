"""One form for every refused request:

{"error": {"type": "too_many", "message": "num=999 is too many; ...", "param": "num"}}
"""

from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

_TRY_AGAIN = (429, 503, 504)


class Refused(HTTPException):
    """A request that is answered with an error: its HTTP status, one word for programs, one line
    for people, and the field that is wrong."""

    def __init__(self, status: int, type: str, message: str, param: str | None = None) -> None:
        super().__init__(status, message, {"retry-after": "1"} if status in _TRY_AGAIN else {})
        self.type: str = type
        self.param: str | None = param

    def body(self) -> dict[str, Any]:
        """Returns the body of the answer."""
        return {"error": {"type": self.type, "message": self.detail, "param": self.param}}

    def response(self, **headers: str) -> Response:
        """Returns the answer."""
        return json_response(self.body(), self.status_code, {**(self.headers or {}), **headers})


def invalid(message: str, param: str | None = None) -> Refused:
    """Returns the refusal of a request with a wrong field."""
    return Refused(422, "invalid", message, param)


def json_bytes(body: Any) -> bytes:  # noqa: ANN401
    """Returns JSON. A float32 is written in the fewest digits that give the same bits back."""
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:  # noqa: ANN401
    """Returns a response whose JSON may contain arrays."""
    return Response(json_bytes(body), status, headers, "application/json")
