"""What the routes do: a request is checked, becomes a job of the engine, and its result becomes an answer."""

import asyncio
import codecs
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import orjson
import torch
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from torch import Tensor

from vssm.checks import shown
from vssm.data import Meta, steps_left
from vssm.nn import State
from vssm.sampling.generation import shares_latents
from vssm.serve.engine import Broken, Done, Engine, Job
from vssm.serve.errors import Refused
from vssm.serve.guard import Metrics
from vssm.serve.models import Served
from vssm.serve.resume import Seal, Store
from vssm.serve.schema import GenerateRequest, ObserveRequest, ResumeRequest, read_sequences
from vssm.serve.settings import Settings

__all__ = ["Service", "json_response"]


class _Plan(NamedTuple):
    """A request that has been checked."""

    job: Job
    keep: str
    stream: bool


class Service:
    """Plans requests, runs them, and keeps what they can be resumed from."""

    def __init__(self, engine: Engine, settings: Settings, metrics: Metrics, key: bytes) -> None:
        self.engine, self.settings, self.metrics = engine, settings, metrics
        self.models = {served.name: served for served in engine.models}
        self.store = Store(
            settings.resume_seconds, settings.resume_count, settings.resume_mib * 2**20
        )
        self.seal = Seal(key, settings.resume_seconds)

    def plan_generate(self, ask: GenerateRequest) -> _Plan:
        """Checks a request for generation."""
        served = self._model(ask.model)
        prompt = read_sequences(served, ask.prompt, ask.prompt_npy, "prompt")
        known = 0 if prompt is None else prompt.shape[1]
        given = 1 if prompt is None else len(prompt)
        num = ask.num or given
        if given not in (1, num):
            raise _invalid("num", num, f"{given}, the rows of the prompt")
        length = ask.length or _steps_left(served, known)
        self._check_dials(served, ask, num, length, known, "prompt")
        keep = self._keep(ask.keep)
        size = self._weigh(served, num, known + length, keep)
        if prompt is not None:
            prompt = prompt.expand(num, *prompt.shape[1:])
        noise = torch.full((num,), ask.seed or 0), torch.arange(num)
        return _plan(ask, served, noise, length, keep, size, prompt=prompt)

    def plan_resume(self, ask: ResumeRequest) -> _Plan:
        """Checks a request to go on."""
        served, state = self._resume(ask.resume, ask.model)
        num = ask.num or state.batch
        if state.batch not in (1, num):
            raise _invalid("num", num, f"{state.batch}, the rows of the state")
        if state.batch != num and shares_latents(served.model, state):
            message = (
                f"num={num} sequences would share the latents behind resume; pass num={num} to /v1/observe, "
                "or the data as a prompt to /v1/generate, so that each draws its own"
            )
            raise Refused(422, "invalid", message, "num")
        length = ask.length or _steps_left(served, state.position)
        known = (
            state.position if served.row_bytes[1] else 0
        )  # what the state has no memory of costs nothing
        self._check_dials(served, ask, num, length, known, "resume")
        keep = self._keep(ask.keep)
        size = self._weigh(served, num, state.position + length, keep)
        if ask.recondition and "blind" in state.children:
            raise Refused(
                422,
                "invalid",
                "recondition=true can not follow an answer without it; allowed: true from the start",
                "recondition",
            )
        noise = State({name: state[name] for name in ("seed", "row")})
        if state.batch != num:
            noise = noise.repeat(num)
        seed = noise["seed"] if ask.seed is None else torch.full((num,), ask.seed)
        return _plan(ask, served, (seed, noise["row"]), length, keep, size, state=state)

    async def answer(self, request: Request, plan: _Plan) -> Response:
        """Runs a plan, whole or as a stream."""
        began, job = time.perf_counter(), plan.job
        if plan.stream:
            loop, pieces = asyncio.get_running_loop(), asyncio.Queue()

            def each(piece: Done | None) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(pieces.put_nowait, piece)

            job.each = each
            # Admitted before the status line is sent, so that a full queue is still a 429.
            result = self._submit(request, job)
            result.add_done_callback(lambda _: pieces.put_nowait(None))
            return _Stream(self._events(plan, pieces, result, began), result)
        done = await self._unless_gone(request, job)
        if done is None:
            return Response(status_code=499)
        assert done.x is not None
        timing = _Timing(began)
        timing.add(done)
        body = _Shown(job.served).steps(done.x, final=True)
        return json_response(body | self._place(job.served, done, plan.keep) | timing.show())

    async def observe(self, request: Request, ask: ObserveRequest) -> Response:
        """Reads data."""
        began, state = time.perf_counter(), None
        if ask.resume is None:
            served = self._model(ask.model)
        else:
            served, state = self._resume(ask.resume, ask.model)
        x = read_sequences(served, ask.x, ask.x_npy, "x")
        if x is None:
            raise Refused(422, "invalid", "x is missing; allowed: x or x_npy", "x")
        before = 0 if state is None or not served.row_bytes[1] else state.position
        own = len(x) if state is None else state.batch
        num = ask.num or own
        if state is not None and num != own:
            raise _invalid("num", num, f"{own}, the rows of resume")
        if len(x) not in (1, num):
            raise Refused(
                422, "invalid", f"x has {len(x)} rows; allowed: {num}, or 1 that serves all", "x"
            )
        self._check_size(num, 1, before + x.shape[1], "x")
        if state is not None and "blind" in state.children:
            message = "resume has no memory of data: it was generated without recondition; allowed: another"
            raise Refused(422, "invalid", message, "resume")
        seed = (
            torch.full((num,), ask.seed or 0)
            if state is None or ask.seed is not None
            else state["seed"]
        )
        row = torch.arange(num) if state is None else state["row"]
        keep = self._keep(ask.keep)
        size = self._weigh(served, num, before + x.shape[1], keep)
        x = x.expand(num, *x.shape[1:])
        job = Job(served, seed, row, None, x, state, keep=keep != "none", bytes=size)
        done = await self._unless_gone(request, job)
        if done is None:
            return Response(status_code=499)
        timing = _Timing(began)
        timing.add(done)
        return json_response(self._place(served, done, keep) | timing.show())

    def _submit(self, request: Request, job: Job) -> "asyncio.Future[Done]":
        """Queues a job for its client, which is known by its address."""
        job.client = "" if request.client is None else request.client.host
        job.deadline = time.monotonic() + self.settings.timeout
        try:
            return asyncio.wrap_future(self.engine.submit(job))
        except Broken as error:
            raise _refused(error) from None

    async def _unless_gone(self, request: Request, job: Job) -> Done | None:
        """Returns the result of a job; None when its client has left, which cancels it."""
        result = self._submit(request, job)
        gone = asyncio.ensure_future(_gone(request))
        gone.add_done_callback(lambda _, cancel=result.cancel: cancel())
        try:
            return await result
        except asyncio.CancelledError:
            if gone.done():
                self.metrics.cancelled.inc()
                return None
            raise
        except (Broken, ValueError) as error:
            raise _refused(error) from None
        finally:
            gone.cancel()
            # An error has this frame in its traceback, and the future has the error: a cycle without this.
            del result

    async def _events(
        self,
        plan: _Plan,
        pieces: "asyncio.Queue[Done | None]",
        result: "asyncio.Future[Done]",
        began: float,
    ) -> AsyncIterator[bytes]:
        job, start, xs = plan.job, 0, []
        shown, timing = _Shown(job.served), _Timing(began)
        try:
            while (piece := await pieces.get()) is not None:
                timing.add(piece)
                xs.append(piece.x)
                end = start + sum(x.shape[1] for x in xs)
                if job.every is None or end % job.every == 0 or end == job.length:
                    steps = shown.steps(torch.cat(xs, 1), final=end == job.length)
                    yield _event("chunk", {"from": start, **steps, **timing.show()})
                    start, xs = end, []
            yield _event("done", self._place(job.served, await result, plan.keep) | timing.show())
        except Refused as refused:
            yield _event("error", refused.body())
        except (Broken, ValueError) as error:
            yield _event("error", _refused(error).body())
        except (asyncio.CancelledError, GeneratorExit):
            self.metrics.cancelled.inc()
            raise
        finally:
            del result  # as above

    def _place(self, served: Served, done: Done, keep: str) -> dict[str, Any]:
        """Keeps the state after a request, or seals it for the client to keep."""
        resume = None
        if keep != "none":
            assert done.state is not None
            if keep == "server":
                resume = self.store.put(served.name, done.state)
            else:
                resume = self.seal.seal(served.name, served.weights, done.state)
        return {"model": served.name, "position": done.position, "resume": resume}

    def _keep(self, keep: str | None) -> str:
        if keep == "server" and not self.settings.handles:
            raise _invalid("keep", keep, "'client' or 'none', since several processes answer")
        return keep or self.settings.keep

    def _model(self, name: str | None) -> Served:
        if name is None:
            return self.engine.models[0]
        if name not in self.models:
            message = f"model={shown(name)} is unknown; allowed: {', '.join(self.models)}"
            raise Refused(404, "unknown_model", message, "model")
        return self.models[name]

    def _resume(self, resume: str, model: str | None) -> tuple[Served, State]:
        if resume.startswith("s."):
            name, weights, state = self.seal.open(resume)
            served = self._model(name)
        else:
            name, state = self.store.get(resume)
            served = self._model(name)
            weights = served.weights
        if model not in (None, name):
            raise _invalid("model", model, f"{name!r}, the model of resume")
        if weights != served.weights:  # the model was trained on, or another took its name
            raise Refused(
                410,
                "resume_outdated",
                f"resume is of other weights of model {name!r} than those here; allowed: one of these",
                "resume",
            )
        return served, state

    def _check_dials(
        self,
        served: Served,
        ask: GenerateRequest | ResumeRequest,
        num: int,
        length: int,
        known: int,
        source: str,
    ) -> None:
        self._check_size(num, length, known, source)
        if not served.parallel and (ask.chunk is not None or ask.recondition):
            name = "recondition" if ask.recondition else "chunk"
            raise _invalid(
                name,
                getattr(ask, name),
                f"a model of kind vssm or tvae, not {served.model.config.kind}",
            )
        if ask.every is not None and (served.parallel or not ask.stream):
            raise _invalid(
                "every", ask.every, "streams of step-by-step models; chunk is for the others"
            )

    def _check_size(self, num: int, length: int, known: int, source: str) -> None:
        limits = self.settings
        for name, value, most in (
            ("num", num, limits.max_num),
            ("length", length, limits.max_length),
            (source, known, limits.max_length),
        ):
            if value > most:
                what = f"{name} of {value} steps" if name == source else f"{name}={shown(value)}"
                raise Refused(
                    422, "too_many", f"{what} is not allowed; allowed: at most {most}", name
                )
        if num * (length + known) > limits.max_cells:
            cells = f"num={num} times {length + known} steps is not allowed; allowed: at most {limits.max_cells}"
            raise Refused(422, "too_many", cells, "num")

    def _weigh(self, served: Served, num: int, steps: int, keep: str) -> int:
        """Returns the bytes of the state that a request ends with; too many are refused before the work."""
        limits, size = self.settings, served.state_bytes(num, steps)
        most = limits.work_mib * 2**20
        if keep == "server":
            most = min(most, limits.resume_mib * 2**20)
        elif keep == "client":
            most = min(most, limits.max_body * 3 // 8)  # in base64, half of a request
        if size > most:
            fewer = "ask for fewer sequences or steps" + (
                "" if keep == "none" else ", or keep='none'"
            )
            raise Refused(
                413,
                "state_too_large",
                f"the state has {size} bytes; allowed: {most}, so {fewer}",
                "keep",
            )
        return size


class _Stream(StreamingResponse):
    """Streams events of a job, which is cancelled however the stream ends."""

    def __init__(self, events: AsyncIterator[bytes], result: "asyncio.Future[Done]") -> None:
        # Proxies would collect events before they pass them on.
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._result = result

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._result.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _steps_left(served: Served, known: int) -> int:
    """Returns the steps of a sequence after those that are known, by the rule of `vssm generate`."""
    try:
        return steps_left(served.meta, known)
    except ValueError as error:
        raise Refused(422, "invalid", str(error), "length") from None


class _Shown:
    """Writes steps as they come; of text, a character whose bytes are in two events is in the second."""

    def __init__(self, served: Served) -> None:
        self._meta = served.meta if served.text else None
        self._decoders: list[codecs.IncrementalDecoder] = []

    def steps(self, x: Tensor, final: bool) -> dict[str, Any]:
        if not x.isfinite().all():  # JSON has no word for it
            message = "the model's output overflowed to NaN or infinity; send smaller values or a lower temperature"
            raise Refused(422, "overflow", message)
        return {
            "x": x.numpy(),
            "text": None if self._meta is None else self._text(self._meta, x, final),
        }

    def _text(self, meta: Meta, x: Tensor, final: bool) -> list[str]:
        if meta.vocabulary is not None:
            return [meta.decode(tokens) for tokens in x]
        self._decoders = self._decoders or [
            codecs.getincrementaldecoder("utf-8")("replace") for _ in x
        ]
        return [
            decoder.decode(bytes(tokens.tolist()), final)
            for decoder, tokens in zip(self._decoders, x, strict=True)
        ]


class _Timing:
    """Adds up where the time of a request went."""

    def __init__(self, began: float) -> None:
        self._began, self._compute, self._rows = began, 0.0, 0

    def add(self, done: Done) -> None:
        self._compute += done.seconds
        self._rows = done.rows

    def show(self) -> dict[str, Any]:
        total = time.perf_counter() - self._began
        numbers = {"compute_ms": round(1e3 * self._compute, 3), "total_ms": round(1e3 * total, 3)}
        return {"timing": {**numbers, "rows": self._rows}}


def _plan(
    ask: GenerateRequest | ResumeRequest,
    served: Served,
    noise: tuple[Tensor, Tensor],
    length: int,
    keep: str,
    size: int,
    prompt: Tensor | None = None,
    state: State | None = None,
) -> _Plan:
    every = None if not ask.stream else ask.chunk if served.parallel else ask.every or 1
    job = Job(
        served,
        *noise,
        length,
        prompt,
        state,
        ask.chunk,
        ask.recondition,
        ask.temperature,
        sample=ask.observe == "sample",
        keep=keep != "none",
        every=every,
        bytes=size,
    )
    return _Plan(job, keep, ask.stream)


def _refused(error: Broken | ValueError) -> Refused:
    """Returns the answer to an error of the engine; a `ValueError` is a mistake that no check saw before."""
    if isinstance(error, Broken):
        return Refused(503, "failed", str(error))
    return Refused(422, "invalid", str(error))


def _invalid(param: str, value: object, allowed: str) -> Refused:
    return Refused(
        422, "invalid", f"{param}={shown(value)} is not allowed; allowed: {allowed}", param
    )


def _dumps(body: Any) -> bytes:  # noqa: ANN401
    # Numbers of 32 bits are written in the fewest digits that give the same bits back.
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:  # noqa: ANN401
    """Returns a body as JSON; arrays of numbers may be part of it."""
    return Response(_dumps(body), status, headers, "application/json")


def _event(name: str, body: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _dumps(body) + b"\n\n"
