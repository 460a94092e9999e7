"""The client: the calls of the package, answered by a server.

It tries again, after the time the server asks for, when the server is busy, restarting or out of reach: a
seed names a sample, so asking twice does no harm.
"""

import base64
import io
import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from vssm.checks import printable

__all__ = ["Answer", "Client", "ServerError"]

_AGAIN = (429, 500, 502, 503, 504)
_LONGEST = 5.0  # seconds between two tries


class Answer(NamedTuple):
    """What a server made."""

    x: np.ndarray
    """The new steps, (num, length, features) float32, or (num, length) int64 tokens."""
    text: list[str] | None
    position: int
    """Steps read and made so far."""
    resume: str | None
    """Where to go on: pass it to `resume` or `observe`."""
    timing: dict[str, float]


class ServerError(ValueError):
    """What a server refused, in its words; `status`, `type` and `param` say what and why."""

    def __init__(self, status: int, type: str, message: str, param: str | None = None) -> None:
        super().__init__(printable(" ".join(str(message).split())))
        self.status, self.type, self.param = status, type, param


class Client:
    """Talks to a server.

    Arguments:
        url: Where it is, for example "http://127.0.0.1:8000".
        token: What it asks for as bearer.
        timeout: Seconds to wait for an answer.
        retries: How often a call is tried again.
    """

    def __init__(
        self, url: str, token: str | None = None, timeout: float = 60.0, retries: int = 5
    ) -> None:
        try:
            import httpx
        except ImportError:
            raise ValueError(
                "the client needs httpx; install it with: pip install 'vssm[serve]'"
            ) from None
        token = None if token is None else token.strip()  # a file of one line ends in a line break
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ValueError(
                "token has characters that no header can have; allowed: printable ASCII"
            )
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._url, self._retries, self._httpx = url.rstrip("/"), retries, httpx
        # The environment's proxies are not for us: a server is named in full, often on this machine.
        try:
            self._http = httpx.Client(
                base_url=self._url, headers=headers, timeout=timeout, trust_env=False
            )
        except httpx.InvalidURL as error:
            raise ValueError(
                f"url={url!r} is not allowed ({error}); allowed: an address like 'http://127.0.0.1:8000'"
            ) from None

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections."""
        self._http.close()

    def models(self) -> list[dict[str, Any]]:
        """Returns what is served, the default first."""
        models = self._call("GET", "/v1/models").get("models")
        if not isinstance(models, list) or not all(isinstance(one, dict) for one in models):
            raise self._foreign()
        return models

    def generate(self, prompt: np.ndarray | str | None = None, **options: Any) -> Answer:  # noqa: ANN401
        """Generates; options are those of POST /v1/generate: model, num, length, chunk, seed and so on."""
        return self._answer("/v1/generate", _with_array(options, "prompt", prompt))

    def resume(self, resume: str, **options: Any) -> Answer:  # noqa: ANN401
        """Goes on from `Answer.resume`; options are those of POST /v1/resume."""
        return self._answer("/v1/resume", {**options, "resume": resume})

    def observe(self, x: np.ndarray | str, resume: str | None = None, **options: Any) -> str:  # noqa: ANN401
        """Reads data, after what was read before, and returns where to resume from."""
        body = _with_array({**options, "resume": resume}, "x", x)
        told = self._call("POST", "/v1/observe", body)
        if "resume" not in told:
            raise self._foreign()
        return told["resume"]

    def stream(
        self,
        prompt: np.ndarray | str | None = None,
        **options: Any,  # noqa: ANN401
    ) -> Iterator[dict[str, Any]]:
        """Yields events as they come: chunks, with "from" and "x", then one with "resume"."""
        path = "/v1/resume" if "resume" in options else "/v1/generate"
        body = {**_with_array(options, "prompt", prompt), "stream": True}
        name = ""
        try:
            with self._http.stream("POST", path, json=body) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise _error(reply)
                for line in reply.iter_lines():
                    field, _, value = line.partition(": ")
                    if field == "event":
                        name = value
                    elif field == "data":
                        event = self._object(value)
                        if name == "error":
                            raise self._told(event)
                        yield event
        except self._httpx.TransportError as error:
            raise self._unreachable(error) from None
        except self._httpx.DecodingError:
            raise self._foreign() from None
        if name != "done":
            raise ServerError(200, "cut", f"the answer of {self._url} ended too early")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        for left in range(self._retries, -1, -1):
            wait = min(_LONGEST, 0.1 * 2 ** (self._retries - left))
            try:
                reply = self._http.request(method, path, json=body)
            except self._httpx.TransportError as error:
                if not left:
                    raise self._unreachable(error) from None
            except self._httpx.DecodingError:
                raise self._foreign() from None
            else:
                if reply.status_code == 200:
                    return self._object(reply.content)
                if reply.status_code not in _AGAIN or not left:
                    raise _error(reply)
                asked = reply.headers.get("retry-after", "")
                wait = max(wait, min(_LONGEST, float(asked) if asked.isdecimal() else 0))
            time.sleep(wait)
        raise AssertionError

    def _answer(self, path: str, body: dict[str, Any]) -> Answer:
        told = self._call("POST", path, body)
        try:
            x = np.array(told["x"])
            if x.dtype.kind not in "fi" or x.ndim not in (2, 3):
                raise self._foreign()
            x = x.astype(np.float32) if x.dtype.kind == "f" else x
            text, position = told["text"], told["position"]
            if type(position) is not int or not (
                text is None or all(isinstance(row, str) for row in text)
            ):
                raise self._foreign()
            return Answer(x, text, position, told["resume"], told["timing"])
        except (KeyError, TypeError, ValueError):  # of rows of different lengths, among others
            raise self._foreign() from None

    def _object(self, text: str | bytes) -> dict[str, Any]:
        """Reads a JSON object, which is all that a server of ours sends."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise self._foreign()
        return values

    def _told(self, event: dict[str, Any]) -> ServerError:
        """Returns the error that came in the middle of a stream."""
        try:
            error = event["error"]
            return ServerError(200, error["type"], error["message"], error["param"])
        except (KeyError, TypeError):
            return self._foreign()

    def _foreign(self) -> ServerError:
        """Something else listens there, such as the page of a router."""
        message = (
            f"{self._url} does not answer as vssm serve does; allowed: the address of one that runs"
        )
        return ServerError(200, "foreign", message)

    def _unreachable(self, error: Exception) -> ServerError:
        what = str(error) or type(error).__name__
        return ServerError(0, "unreachable", f"{self._url} can not be reached: {what}")


def _with_array(
    options: dict[str, Any], name: str, value: np.ndarray | str | None
) -> dict[str, Any]:
    body = {key: option for key, option in options.items() if option is not None}
    if isinstance(value, str):
        body[name] = value
    elif value is not None:
        file = io.BytesIO()
        np.save(file, np.asarray(value), allow_pickle=False)
        body[f"{name}_npy"] = base64.b64encode(file.getvalue()).decode()
    return body


def _error(reply: Any) -> ServerError:  # noqa: ANN401
    try:
        error = reply.json()["error"]
        return ServerError(reply.status_code, error["type"], error["message"], error["param"])
    except (ValueError, KeyError, TypeError):
        return ServerError(
            reply.status_code, "unknown", f"{reply.url} answered {reply.status_code}"
        )
