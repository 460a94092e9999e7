"""What the routes do: a request becomes passes of bounded size, to be streamed, cancelled and fair to others.

| who | steps of a pass |
| --- | --- |
| vssm, tvae | a chunk when streamed, else up to 8192 steps of all sequences together |
| with re-conditioning | a chunk when streamed, else whole chunks up to 32 steps |
| the others | `every` when streamed, else 32 |

A pass goes on from the state of the one before, which gives what one call would have given.
"""

import asyncio
import codecs
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, NamedTuple

import orjson
import torch
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from torch import Tensor

from vssm.config import shown
from vssm.data import Meta, steps_left
from vssm.nn import State
from vssm.serve.engine import Broken, Done, Engine, Job
from vssm.serve.errors import Refused
from vssm.serve.guard import Metrics
from vssm.serve.models import Served
from vssm.serve.resume import Seal, Store
from vssm.serve.schema import GenerateRequest, ObserveRequest, ResumeRequest, read_sequences
from vssm.serve.settings import Settings

__all__ = ["Service", "json_response"]

_PASS = 32  # steps of a pass that is made step by step
_CELLS = 8192  # sequences times steps of a pass that is made at once


class _Plan(NamedTuple):
    """What a request asks for, checked."""

    served: Served
    seed: Tensor
    row: Tensor
    prompt: Tensor | None
    state: State | None
    length: int
    keep: str
    bytes: int
    ask: GenerateRequest | ResumeRequest

    def passes(self) -> Iterator[tuple[int, int | None]]:
        """Yields the steps and the chunk size of every pass."""
        ask, length = self.ask, self.length
        chunk = min(ask.chunk or length, length)
        most = _PASS if ask.recondition else max(1, _CELLS // len(self.row))
        if not ask.recondition and not (ask.chunk and ask.stream):
            chunk = min(chunk, most)  # what a chunk changes is only how much is made at once
        if not self.served.parallel:
            width, chunk = (ask.every or 1) if ask.stream else _PASS, None
        elif ask.stream:
            width = chunk
        else:
            width = chunk * max(1, most // chunk)
        for first in range(0, length, width):
            yield min(width, length - first), chunk


class Service:
    """Plans requests, runs them, and keeps what they can be resumed from."""

    def __init__(self, engine: Engine, settings: Settings, metrics: Metrics, key: bytes) -> None:
        self.engine, self.settings, self.metrics = engine, settings, metrics
        self.models = {served.name: served for served in engine.models}
        self.store = Store(settings.resume_seconds, settings.resume_count, settings.resume_mib * 2**20)
        self.seal = Seal(key, settings.resume_seconds)
        self.in_progress = self.bytes_in_progress = 0

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
        seed = torch.full((num,), ask.seed or 0)
        return _Plan(served, seed, torch.arange(num), prompt, None, length, keep, size, ask)

    def plan_resume(self, ask: ResumeRequest) -> _Plan:
        """Checks a request to go on."""
        served, state = self._resume(ask.resume, ask.model)
        num = ask.num or state.batch
        if state.batch not in (1, num):
            raise _invalid("num", num, f"{state.batch}, the rows of the state")
        length = ask.length or _steps_left(served, state.position)
        known = state.position if served.row_bytes[1] else 0  # what the state has no memory of costs nothing
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
        return _Plan(served, seed, noise["row"], None, state, length, keep, size, ask)

    async def answer(self, request: Request, plan: _Plan) -> Response:
        """Runs a plan, whole or as a stream."""
        began = time.perf_counter()
        if plan.ask.stream:
            # Admitted before the status line is sent, so that a full queue is still a 429.
            slot = contextlib.ExitStack()
            slot.enter_context(self._admit(plan.bytes))
            return _Stream(self._events(plan, began), slot)

        async def work() -> Response:
            xs, timing, last = [], _Timing(began), None
            async for last in self._run(plan):
                xs.append(last.x)
                timing.add(last)
            assert last is not None
            body = _Shown(plan.served).steps(torch.cat(xs, 1), final=True)
            return json_response(body | self._place(plan.served, last, plan.keep) | timing.show())

        with self._admit(plan.bytes):
            return await self._unless_gone(request, work())

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
        self._check_size(len(x), 1, before + x.shape[1], "x")
        if state is not None and state.batch != len(x):
            raise Refused(
                422, "invalid", f"x has {len(x)} rows; allowed: {state.batch}, those of resume", "x"
            )
        if state is not None and "blind" in state.children:
            message = "resume has no memory of data: it was generated without recondition; allowed: another"
            raise Refused(422, "invalid", message, "resume")
        seed = (
            torch.full((len(x),), ask.seed or 0) if state is None or ask.seed is not None else state["seed"]
        )
        row = torch.arange(len(x)) if state is None else state["row"]
        keep = self._keep(ask.keep)
        size = self._weigh(served, len(x), before + x.shape[1], keep)
        job = Job(served, seed, row, None, x, state, keep=keep != "none")

        async def work() -> Response:
            done = await self._compute(job, asyncio.get_running_loop().time() + self.settings.timeout)
            timing = _Timing(began)
            timing.add(done)
            return json_response(self._place(served, done, keep) | timing.show())

        with self._admit(size):
            return await self._unless_gone(request, work())

    async def _run(self, plan: _Plan) -> AsyncIterator[Done]:
        """Yields the passes of a plan, each computed when it is asked for."""
        prompt, state, ask = plan.prompt, plan.state, plan.ask
        dials = {
            "temperature": ask.temperature,
            "sample": ask.observe == "sample",
            "recondition": ask.recondition,
        }
        deadline = asyncio.get_running_loop().time() + self.settings.timeout
        made = 0
        for length, chunk in plan.passes():
            made += length
            keep = made < plan.length or plan.keep != "none"
            job = Job(plan.served, plan.seed, plan.row, length, prompt, state, chunk, **dials, keep=keep)
            done = await self._compute(job, deadline)
            yield done
            prompt, state = None, done.state

    async def _compute(self, job: Job, deadline: float) -> Done:
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.wrap_future(self.engine.submit(job))
        except TimeoutError:
            allowed = f"allowed: {self.settings.timeout:g} s, so ask for less"
            raise Refused(504, "timeout", f"the request took too long; {allowed}", retry_after=1) from None
        except Broken as error:
            raise Refused(503, "failed", str(error)) from None
        except ValueError as error:  # a mistake that the checks before did not see
            raise Refused(422, "invalid", str(error)) from None

    async def _events(self, plan: _Plan, began: float) -> AsyncIterator[bytes]:
        start, shown, timing, last = 0, _Shown(plan.served), _Timing(began), None
        try:
            async for last in self._run(plan):
                assert last.x is not None
                timing.add(last)
                end = start + last.x.shape[1]
                steps = shown.steps(last.x, final=end == plan.length)
                yield _event("chunk", {"from": start, **steps, **timing.show()})
                start = end
            assert last is not None
            yield _event("done", self._place(plan.served, last, plan.keep) | timing.show())
        except Refused as refused:
            yield _event("error", refused.body())
        except (asyncio.CancelledError, GeneratorExit):
            self.metrics.cancelled.inc()
            raise

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
                name, getattr(ask, name), f"a model of kind vssm or tvae, not {served.model.config.kind}"
            )
        if ask.every is not None and (served.parallel or not ask.stream):
            raise _invalid("every", ask.every, "streams of step-by-step models; chunk is for the others")

    def _check_size(self, num: int, length: int, known: int, source: str) -> None:
        limits = self.settings
        for name, value, most in (
            ("num", num, limits.max_num),
            ("length", length, limits.max_length),
            (source, known, limits.max_length),
        ):
            if value > most:
                what = f"{name} of {value} steps" if name == source else f"{name}={shown(value)}"
                raise Refused(422, "too_many", f"{what} is not allowed; allowed: at most {most}", name)
        if num * (length + known) > limits.max_cells:
            cells = (
                f"num={num} times {length + known} steps is not allowed; allowed: at most {limits.max_cells}"
            )
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
            fewer = "ask for fewer sequences or steps" + ("" if keep == "none" else ", or keep='none'")
            raise Refused(
                413, "state_too_large", f"the state has {size} bytes; allowed: {most}, so {fewer}", "keep"
            )
        return size

    @contextlib.contextmanager
    def _admit(self, size: int) -> Iterator[None]:
        most = self.settings.max_queue
        if self.engine.failure is not None:
            raise Refused(503, "failed", self.engine.failure)
        if self.in_progress >= most:
            raise Refused(429, "busy", f"{most} requests are in progress; try again soon", retry_after=1)
        if self.bytes_in_progress + size > self.settings.work_mib * 2**20:
            raise Refused(429, "busy", "large requests are in progress; try again soon", retry_after=1)
        self.in_progress += 1
        self.bytes_in_progress += size
        self.metrics.in_progress.set(self.in_progress)
        try:
            yield
        finally:
            self.in_progress -= 1
            self.bytes_in_progress -= size
            self.metrics.in_progress.set(self.in_progress)

    async def _unless_gone(self, request: Request, work: Coroutine[Any, Any, Response]) -> Response:
        """Awaits the work, and cancels it when the client leaves."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return await task
            self.metrics.cancelled.inc()
            return Response(status_code=499)
        finally:
            task.cancel()
            gone.cancel()


class _Stream(StreamingResponse):
    """Streams events in a place of the queue, which is free again however the stream ends."""

    def __init__(self, events: AsyncIterator[bytes], slot: contextlib.ExitStack) -> None:
        # Proxies would collect events before they pass them on.
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._slot = slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._slot:
            await super().__call__(scope, receive, send)


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
        return {"x": x.numpy(), "text": None if self._meta is None else self._text(self._meta, x, final)}

    def _text(self, meta: Meta, x: Tensor, final: bool) -> list[str]:
        if meta.vocabulary is not None:
            return [meta.decode(tokens) for tokens in x]
        self._decoders = self._decoders or [codecs.getincrementaldecoder("utf-8")("replace") for _ in x]
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


def _invalid(param: str, value: object, allowed: str) -> Refused:
    return Refused(422, "invalid", f"{param}={shown(value)} is not allowed; allowed: {allowed}", param)


def _dumps(body: Any) -> bytes:  # noqa: ANN401
    # Numbers of 32 bits are written in the fewest digits that give the same bits back.
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:  # noqa: ANN401
    """Returns a body as JSON; arrays of numbers may be part of it."""
    return Response(_dumps(body), status, headers, "application/json")


def _event(name: str, body: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _dumps(body) + b"\n\n"
