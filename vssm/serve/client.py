"""A client with the calls of the package, answered by a server.

It tries again when the server is busy, restarting or out of reach. A seed names a sample, so asking
twice does no harm.
"""

import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from vssm.checks import printable

__all__ = ["Answer", "Client", "ServerError"]

_RETRIED = (0, 429, 500, 502, 503, 504)  # 0: out of reach
_LONGEST = 5.0  # seconds between two tries


class Answer(NamedTuple):
    """The answer of a server."""

    x: np.ndarray
    """The new steps, (num, length, features) float32, or (num, length) int64 tokens."""
    text: list[str] | None
    position: int
    """Steps read and made so far."""
    resume: str | None
    """Where to continue: pass it to `resume` or `observe`."""
    timing: dict[str, float]


class ServerError(ValueError):
    """A refusal in the words of the server; `status`, `type` and `param` say what and why."""

    status: int
    type: str
    param: str | None

    def __init__(self, status: int, type: str, message: str, param: str | None = None) -> None:
        super().__init__(printable(" ".join(str(message).split())))
        self.status, self.type, self.param = status, type, param


class Client:
    """Talks to a server.

    Arguments:
        url: Its address, for example "http://127.0.0.1:8000".
        token: The bearer token that it asks for.
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
        self._url, self._retries, self._httpx = url.rstrip("/"), retries, httpx
        token = None if token is None else token.strip()  # a token file ends in a line break
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ValueError("token has characters that no header can have; use printable ASCII")
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        # The address is complete and often local, so proxies of the environment are ignored.
        self._http = httpx.Client(
            base_url=self._url, headers=headers, timeout=timeout, trust_env=False
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def models(self) -> list[dict[str, Any]]:
        """Returns the served models, the default first."""
        return self._call("GET", "/v1/models", None, "models")["models"]

    def generate(self, prompt: np.ndarray | str | None = None, **options: Any) -> Answer:  # noqa: ANN401
        """Generates; options are the fields of POST /v1/generate: model, num, length, seed, ..."""
        return self._answer("/v1/generate", _with_array(options, "prompt", prompt))

    def resume(self, resume: str, **options: Any) -> Answer:  # noqa: ANN401
        """Continues from `Answer.resume`; options are the fields of POST /v1/resume."""
        return self._answer("/v1/resume", {**options, "resume": resume})

    def observe(self, x: np.ndarray | str, resume: str | None = None, **options: Any) -> str:  # noqa: ANN401
        """Reads data, after data that was read before, and returns where to resume."""
        body = _with_array({**options, "resume": resume}, "x", x)
        return self._call("POST", "/v1/observe", body, "resume")["resume"]

    def fill(self, x: np.ndarray | str, **options: Any) -> np.ndarray:  # noqa: ANN401
        """Fills gaps, NaN or in text "_"; options are the fields of POST /v1/fill."""
        return np.array(self._call("POST", "/v1/fill", _with_array(options, "x", x), "x")["x"])

    def forecast(self, history: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:  # noqa: ANN401
        """Forecasts what follows rows of unique_id, ds and y; options are the fields of POST
        /v1/forecast. Returns rows of unique_id, ds, mean and quantiles, or paths."""
        return self._call("POST", "/v1/forecast", {**options, "history": history}, "forecast")[
            "forecast"
        ]

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
                    raise self._error(reply.status_code, reply.content)
                for line in reply.iter_lines():
                    field, _, value = line.partition(": ")
                    if field == "event":
                        name = value
                    elif field == "data" and name == "error":
                        raise self._error(200, value)
                    elif field == "data":
                        yield self._object(value)
        except self._httpx.RequestError as error:
            raise self._unreachable(error) from None
        if name != "done":
            raise ServerError(200, "cut", f"the answer of {self._url} ended too early")

    def _call(self, method: str, path: str, body: dict[str, Any] | None, *names: str) -> Any:  # noqa: ANN401
        """Returns an answer, which must have fields of these names."""
        for tried in range(self._retries + 1):
            try:
                reply = self._http.request(method, path, json=body)
                if reply.status_code == 200:
                    return self._object(reply.content, *names)
                refused = self._error(reply.status_code, reply.content)
            except self._httpx.RequestError as error:
                refused = self._unreachable(error)
            if refused.status not in _RETRIED or tried == self._retries:
                raise refused
            time.sleep(min(_LONGEST, 0.1 * 2**tried))
        raise AssertionError

    def _answer(self, path: str, body: dict[str, Any]) -> Answer:
        reply = self._call("POST", path, body, *Answer._fields)
        x = np.array(reply["x"])
        x = x.astype(np.float32) if x.dtype.kind == "f" else x
        return Answer(x, *(reply[name] for name in Answer._fields[1:]))

    def _object(self, text: str | bytes, *names: str) -> dict[str, Any]:
        """Parses a JSON object with these fields; our servers send nothing else."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or not set(names) <= set(values):
            message = f"{self._url} does not answer as vssm serve does; check the address"
            raise ServerError(200, "foreign", message)
        return values

    def _error(self, status: int, text: str | bytes) -> ServerError:
        try:
            return ServerError(status, **self._object(text, "error")["error"])
        except (ValueError, TypeError):
            return ServerError(status, "foreign", f"{self._url} answered {status}, not as a vssm")

    def _unreachable(self, error: Exception) -> ServerError:
        reason = str(error) or type(error).__name__
        return ServerError(0, "unreachable", f"{self._url} can not be reached: {reason}")


def _with_array(
    options: dict[str, Any], name: str, value: np.ndarray | str | None
) -> dict[str, Any]:
    """Returns the options that are not None, and sequences as JSON has them: null for a gap."""
    body = {key: option for key, option in options.items() if option is not None}
    if isinstance(value, str):
        body[name] = value
    elif value is not None:
        array = np.asarray(value)
        if array.dtype.kind == "f" and (gaps := np.isnan(array)).any():
            array = array.astype(object)
            array[gaps] = None
        body[name] = array.tolist()
    return body
