"""Turns requests into jobs, and their results into answers."""

import asyncio
import codecs
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import torch
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask
from torch import Tensor

from vssm import noise
from vssm.checks import shown
from vssm.data import steps_left
from vssm.nn import State
from vssm.sampling.request import shares_latents
from vssm.serve.errors import Refused, invalid, json_bytes, json_response
from vssm.serve.forecast import ForecastRequest, plan_forecast
from vssm.serve.guard import Metrics
from vssm.serve.jobs import AnyJob, CallJob, Done, FillJob, Job
from vssm.serve.models import Served, ServedForecaster
from vssm.serve.resume import Store
from vssm.serve.schema import (
    FillRequest,
    GenerateRequest,
    ObserveRequest,
    ResumeRequest,
    read_gaps,
    read_sequences,
)
from vssm.serve.settings import Settings
from vssm.serve.worker import Worker

__all__ = ["Service"]

_RECONDITIONED = 16  # most pieces of work in a chunk with recondition: about 3 s


class Service:
    """Plans requests, runs them, and keeps the states that they can be resumed from."""

    worker: Worker
    settings: Settings
    metrics: Metrics

    def __init__(
        self,
        worker: Worker,
        forecasters: list[ServedForecaster],
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self.worker, self.settings, self.metrics = worker, settings, metrics
        self.models: dict[str, Served] = {served.name: served for served in worker.models}
        self.forecasters = forecasters
        most = settings.resume_mib * 2**20
        self.store: Store = Store(settings.resume_seconds, settings.resume_count, most)

    def plan_generate(self, ask: GenerateRequest) -> Job:
        """Returns the job of a request, or refuses it."""
        served = self._model(ask.model)
        prompt = read_sequences(served, ask.prompt, "prompt")
        rows = 1 if prompt is None else len(prompt)
        num = ask.num or rows
        if rows not in (1, num):
            raise invalid(f"num={num} does not fit the prompt; use its {rows} rows", "num")
        return self._job(ask, served, num, prompt, None)

    def plan_resume(self, ask: ResumeRequest) -> Job:
        """Returns the job of a request, or refuses it."""
        served, state = self._resume(ask.resume, ask.model)
        num = ask.num or state.batch
        if state.batch not in (1, num):
            raise invalid(f"num={num} does not fit resume; use its {state.batch} rows", "num")
        if state.batch != num and shares_latents(served.model, state):
            message = (
                f"num={num} sequences would share the latents behind resume; pass num={num} to "
                "/v1/observe, or the data as a prompt to /v1/generate, so that each draws its own"
            )
            raise invalid(message, "num")
        if ask.recondition and "blind" in state.children:
            message = "recondition=true can not follow an answer without it; set it from the start"
            raise invalid(message, "recondition")
        return self._job(ask, served, num, None, state)

    def plan_observe(self, ask: ObserveRequest) -> Job:
        """Returns the job of a request, or refuses it."""
        served, state = self._model(ask.model), None
        if ask.resume is not None:
            served, state = self._resume(ask.resume, ask.model)
        x = read_sequences(served, ask.x, "x")
        if x is None:
            raise invalid("x is missing", "x")
        num = ask.num or (len(x) if state is None else state.batch)
        if state is not None and num != state.batch:
            raise invalid(f"num={num} does not fit resume; use its {state.batch} rows", "num")
        if len(x) not in (1, num):
            raise invalid(f"x has {len(x)} rows; give {num}, or one row for all", "x")
        if state is not None and "blind" in state.children:
            message = "resume can not read data: it was generated without recondition"
            raise invalid(message, "resume")
        return self._job(ask, served, num, x, state)

    def plan_fill(self, ask: FillRequest) -> FillJob:
        """Returns the job of a request, or refuses it."""
        served = self._model(ask.model)
        x, known = read_gaps(served, ask.x)
        rows, num = len(x), ask.num or 1
        self._check_size(rows * num, 0, x.shape[1], "x", ask.passes)
        row = torch.arange(rows)
        row = row if ask.num is None else noise.fork(row, num).flatten()
        x, known = x.repeat_interleave(num, 0), known.repeat_interleave(num, 0)
        seed = torch.full((len(row),), ask.seed or 0)
        dials = {"temperature": ask.temperature, "sample": ask.observe == "sample"}
        return FillJob(served, seed, row, x, known, ask.passes, **dials)

    def plan_forecast(self, ask: ForecastRequest) -> CallJob:
        """Returns the job of a request, or refuses it."""
        return plan_forecast(ask, self.forecasters, self.settings)

    def _job(
        self,
        ask: GenerateRequest | ResumeRequest | ObserveRequest,
        served: Served,
        num: int,
        data: Tensor | None,
        state: State | None,
    ) -> Job:
        position = 0 if state is None else state.position
        steps = 0 if data is None else data.shape[1]
        length, options = None, {}
        if not isinstance(ask, ObserveRequest):
            length = ask.length or _steps_left(served, position + steps)
            options = _dials(ask, served, num, length)
        # A state of constant size remembers no single steps, so they count for nothing.
        known = steps + (position if served.remembers_steps else 0)
        source = "resume" if data is None else "x" if length is None else "prompt"
        self._check_size(num, length or 0, known, source)
        seed, row = torch.full((num,), ask.seed or 0), torch.arange(num)
        if state is not None:
            source = State({name: state[name] for name in ("seed", "row")})
            source = source if state.batch == num else source.repeat(num)
            seed, row = source["seed"] if ask.seed is None else seed, source["row"]
        if data is not None:
            data = data.expand(num, *data.shape[1:])
        return Job(served, seed, row, length, data, state, keep=ask.keep, **options)

    def _check_size(self, num: int, length: int, known: int, source: str, passes: int = 1) -> None:
        limits, steps = self.settings, passes * (length + known)
        for name, value, most, given in (
            ("num", num, limits.max_num, f"num={shown(num)} is"),
            ("length", length, limits.max_length, f"length={shown(length)} is"),
            (source, known, limits.max_length, f"the {known} steps of {source} are"),
            ("num", num * steps, limits.max_cells, f"{num} times {steps} steps are"),
        ):
            if value > most:
                raise Refused(422, "too_many", f"{given} too many; use at most {most}", name)

    def _model(self, name: str | None) -> Served:
        name = next(iter(self.models), None) if name is None else name
        found = None if name is None else self.models.get(name)
        if found is None:
            names = ", ".join(self.models) or "/v1/forecast, since only forecasters are served"
            message = f"model={shown(name)} is unknown; use {names}"
            raise Refused(404, "unknown_model", message, "model")
        return found

    def _resume(self, resume: str, model: str | None) -> tuple[Served, State]:
        name, state = self.store.get(resume)
        if model not in (None, name):
            message = f"model={shown(model)} is not that of resume; use {name!r}"
            raise invalid(message, "model")
        return self._model(name), state

    async def answer(self, request: Request, job: AnyJob) -> Response:
        """Runs a job, whole or as a stream."""
        began = time.perf_counter()
        job.deadline = time.monotonic() + self.settings.timeout
        if isinstance(job, Job) and job.stream:
            return self._stream(job, began)
        told: dict[str, Any] = {"model": job.name}
        if isinstance(job, FillJob):
            told["order"] = job.served.order(job.known, job.seed, job.row, job.passes).numpy()
        served = None if isinstance(job, CallJob) else job.served
        keep = job.keep if isinstance(job, Job) else None
        done = await self._unless_gone(request, job)
        if done is None:
            return Response(status_code=499)
        if served is None:
            told["forecast"] = done.x
        elif done.x is not None:
            told |= _Steps(served).show(done.x, final=True)
        if served is not None and keep is not None:
            told |= self._keep(served, done, keep)
        return json_response({**told, **_timing(began, done.seconds, done.rows)})

    async def _unless_gone(self, request: Request, job: AnyJob) -> Done | None:
        """Returns the result of a job; None when its client has left, which cancels the job."""
        result = asyncio.wrap_future(self.worker.submit(job))
        gone = asyncio.ensure_future(_gone(request))
        gone.add_done_callback(lambda _, cancel=result.cancel: cancel())
        try:
            return await result
        except asyncio.CancelledError:
            if gone.done():
                self.metrics.cancelled.inc()
                return None
            raise
        finally:
            gone.cancel()
            # An error has this frame in its traceback, and the future has the error: a cycle.
            del result

    def _stream(self, job: Job, began: float) -> Response:
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue()

        def each(piece: Done) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        job.each = each
        # Submitted before the status line is sent, so that a full queue is still a 429.
        result = asyncio.wrap_future(self.worker.submit(job))
        result.add_done_callback(lambda _: pieces.put_nowait(None))

        async def cancel() -> None:  # runs even if the client leaves before the first event
            result.cancel()

        # Without these headers, proxies would collect events before they pass them on.
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        events = self._events(job, pieces, result, began)
        return StreamingResponse(events, 200, headers, "text/event-stream", BackgroundTask(cancel))

    async def _events(
        self,
        job: Job,
        pieces: "asyncio.Queue[Done | None]",
        result: "asyncio.Future[Done]",
        began: float,
    ) -> AsyncIterator[bytes]:
        served, every, length = job.served, job.every, job.length
        steps, start, xs, seconds, rows = _Steps(served), 0, [], 0.0, 0
        try:
            while (piece := await pieces.get()) is not None:
                seconds, rows = seconds + piece.seconds, piece.rows
                xs.append(piece.x)
                end = start + sum(x.shape[1] for x in xs)
                if every is None or end % every == 0 or end == length:
                    made = steps.show(torch.cat(xs, 1), final=end == length)
                    timing = _timing(began, seconds, rows)
                    yield _event("chunk", {"from": start, **made, **timing})
                    start, xs = end, []
            kept = self._keep(served, await result, job.keep)
            yield _event("done", {**kept, **_timing(began, seconds, rows)})
        except Refused as refused:
            yield _event("error", refused.body())
        except (asyncio.CancelledError, GeneratorExit):
            self.metrics.cancelled.inc()
            raise
        finally:
            result.cancel()
            del result  # breaks a cycle, as above

    def _keep(self, served: Served, done: Done, keep: str) -> dict[str, Any]:
        """Keeps the final state of a request, and returns where to resume."""
        assert done.state is not None
        resume = self.store.put(served.name, done.state) if keep == "server" else None
        return {"model": served.name, "position": done.state.position, "resume": resume}


class _Steps:
    """Shows new steps as numbers and text. A character split over two events is in the second."""

    def __init__(self, served: Served) -> None:
        self._meta = served.meta if served.text else None
        self._decoders: list[codecs.IncrementalDecoder] = []

    def show(self, x: Tensor, final: bool) -> dict[str, Any]:
        if not x.isfinite().all():  # JSON can not express it
            message = "the model's output overflowed to NaN or infinity; send smaller values "
            raise Refused(422, "overflow", message + "or a lower temperature")
        text = None
        if self._meta is not None and self._meta.vocabulary is not None:
            text = [self._meta.decode(tokens) for tokens in x]
        elif self._meta is not None:
            if not self._decoders:
                self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in x]
            pairs = zip(self._decoders, x, strict=True)
            text = [decoder.decode(bytes(tokens.tolist()), final) for decoder, tokens in pairs]
        return {"x": x.numpy(), "text": text}


def _dials(
    ask: GenerateRequest | ResumeRequest, served: Served, num: int, length: int
) -> dict[str, Any]:
    """Returns the options of a job that makes steps."""
    if ask.recondition and not served.parallel:
        message = f"recondition is for models of kind vssm and tvae, not {served.model.config.kind}"
        raise invalid(message, "recondition")
    if ask.recondition and served.model.config.known == "any":  # windows and chunks would not agree
        raise invalid("this model can not recondition; /v1/fill has passes", "recondition")
    # A chunk is read from the state before it, so it is made in one piece.
    chunk, most = min(ask.chunk or length, length), _RECONDITIONED * served.cells
    if ask.recondition and num * chunk > most:
        message = f"{num} times {chunk} steps are too many to recondition at once"
        raise invalid(f"{message}; use a chunk of at most {max(1, most // num)}", "chunk")
    return {
        "chunk": ask.chunk if served.parallel else None,
        "recondition": ask.recondition,
        "temperature": ask.temperature,
        "sample": ask.observe == "sample",
        "every": (ask.chunk or (None if served.parallel else 1)) if ask.stream else None,
        "stream": ask.stream,
    }


def _steps_left(served: Served, known: int) -> int:
    try:
        return steps_left(served.meta, known)
    except ValueError as error:
        raise invalid(str(error), "length") from None


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _timing(began: float, seconds: float, rows: int) -> dict[str, Any]:
    total = time.perf_counter() - began
    milliseconds = {"compute_ms": round(1e3 * seconds, 3), "total_ms": round(1e3 * total, 3)}
    return {"timing": {**milliseconds, "rows": rows}}


def _event(name: str, body: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + json_bytes(body) + b"\n\n"
