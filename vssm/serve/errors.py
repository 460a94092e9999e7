"""One form for everything that a server refuses:

{"error": {"type": "too_many", "message": "num=999 is not allowed; allowed: 1 to 256", "param": "num"}}
"""

from typing import Any

__all__ = ["Refused"]


class Refused(Exception):
    """A request that is answered with an error.

    Arguments:
        status: The HTTP status.
        type: What went wrong, one word for programs.
        message: What went wrong, one line for people.
        param: The field of the request that it is about.
        retry_after: Seconds after which to try again.
    """

    def __init__(
        self,
        status: int,
        type: str,
        message: str,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.type, self.message, self.param = status, type, message, param
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}

    def body(self) -> dict[str, Any]:
        """Returns the answer's body."""
        return {"error": {"type": self.type, "message": self.message, "param": self.param}}
