"""Turns requests into calls, and their results into answers."""

import asyncio
import codecs
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import torch
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.background import BackgroundTask
from torch import Tensor

from vssm import noise
from vssm.checks import shown
from vssm.data import steps_left
from vssm.nn import State
from vssm.sampling.resuming import check_reads, shares_latents
from vssm.serve.calls import Calls, fill_gaps, make_steps
from vssm.serve.errors import Refused, invalid, json_bytes, json_response
from vssm.serve.forecast import ForecastRequest, plan_forecast
from vssm.serve.guard import Metrics
from vssm.serve.models import Served, ServedForecaster
from vssm.serve.schema import (
    FillRequest,
    GenerateRequest,
    ObserveRequest,
    ResumeRequest,
    read_gaps,
    read_sequences,
)
from vssm.serve.settings import Settings
from vssm.serve.states import Store
from vssm.serve.worker import Done, Worker

_RECONDITIONED = 16  # most calls of a usual size in a chunk with recondition: about 3 s
# Without these headers, proxies would collect events before they pass them on.
_STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class Service:
    """Answers requests, and keeps the states that they can be resumed from.

    Each public method but `make` is a route; its docstring is in /openapi.json.
    """

    def __init__(
        self,
        worker: Worker,
        forecasters: list[ServedForecaster],
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self._worker, self._settings, self._metrics = worker, settings, metrics
        self._models = {served.name: served for served in worker.models}
        self._forecasters = forecasters
        self._store = Store(
            settings.resume_seconds, settings.resume_count, settings.resume_mib * 2**20
        )

    async def generate(self, request: Request, ask: GenerateRequest) -> Response:
        """Generates sequences, from nothing or after a prompt. Returns the new steps x, their text
        for a model of text, the position and resume, which /v1/resume takes."""
        return await self.make(request, ask, ask.prompt)

    async def resume(self, request: Request, ask: ResumeRequest) -> Response:
        """Continues where an answer stopped; the same place can be resumed many times."""
        return await self.make(request, ask, None, ask.resume)

    async def observe(self, request: Request, ask: ObserveRequest) -> Response:
        """Reads data and returns where to resume; `resume` adds more data to earlier data."""
        return await self.make(request, ask, ask.x, ask.resume)

    async def make(
        self,
        request: Request,
        ask: GenerateRequest | ResumeRequest | ObserveRequest,
        sequences: np.ndarray | str | None = None,
        resume: str | None = None,
    ) -> Response:
        """Reads sequences, if any, after a state, if any; then generates steps, unless it is a
        request to observe."""
        began, making = time.perf_counter(), None if isinstance(ask, ObserveRequest) else ask
        served, state = self._start(ask.model, resume)
        name = "x" if making is None else "prompt"
        data = None if sequences is None else read_sequences(served, sequences, name)
        if state is not None and data is not None:
            _check_reads(state, f"{name} cannot follow this state", "resume")
        elif state is not None and making is not None and making.recondition:
            _check_reads(state, "recondition=True cannot start from this state", "recondition")
        num = _count(ask.num, served, data, name, state)
        steps = 0 if data is None else data.shape[1]
        position = 0 if state is None else state.position
        length = 0 if making is None else making.length or _steps_left(served, position + steps)
        # A state of constant size does not keep single steps, so they are not counted.
        known = steps + (position if served.remembers_steps else 0)
        self._check_size(num, length, known, "resume" if data is None else name)
        dials = {} if making is None else _dials(making, served, num, length)
        data = None if data is None else data.expand(num, *data.shape[1:])
        seed, row = _noise(ask.seed, num, state)
        calls = make_steps(served, seed, row, length, data, state, **dials)
        if making is not None and making.stream:
            return self._stream(served, calls, length, ask.keep, began)
        done = await self._result(request, calls)
        made = {} if done.x is None else _Steps(served).show(done.x, final=True)
        return json_response({**self._end(served, done, ask.keep, began), **made})

    async def fill(self, request: Request, ask: FillRequest) -> Response:
        """Fills the gaps of sequences, for a model with `known` "any"; `num` samples of each.
        Returns x, its text for a model of text, and the order: the pass that filled an entry, from
        0; -1 if the entry was known."""
        served, began = self._model(ask.model, "fills"), time.perf_counter()
        x, known = read_gaps(served, ask.x)
        row, num = torch.arange(len(x)), ask.num or 1
        self._check_size(len(x) * num, 0, x.shape[1], "x", ask.passes)
        row = row if ask.num is None else noise.fork(row, num).flatten()
        x, known = x.repeat_interleave(num, 0), known.repeat_interleave(num, 0)
        seed = torch.full((len(row),), ask.seed or 0)
        dials = {"temperature": ask.temperature, "observe": ask.observe}
        calls = fill_gaps(served, seed, row, x, known, passes=ask.passes, **dials)
        order = served.order(known, seed, row, ask.passes).numpy()
        done = await self._result(request, calls)
        facts = {"model": served.name, "order": order, **_timing(began, done)}
        return json_response({**facts, **_Steps(served).show(done.x, final=True)})

    async def forecast(self, request: Request, ask: ForecastRequest) -> Response:
        """Forecasts what follows raw histories. Returns rows with unique_id, ds, mean and a column
        for each quantile, or with the list `paths`."""
        began = time.perf_counter()
        name, calls = plan_forecast(ask, self._forecasters, self._settings)
        done = await self._result(request, calls)
        return json_response({"model": name, "forecast": done.x, **_timing(began, done)})

    async def list_models(self) -> Response:
        """Lists the models and forecasters, and the limits of one request."""
        names = ("max_num", "max_length", "max_cells", "max_body")
        limits = {name: getattr(self._settings, name) for name in names}
        models = [served.describe() for served in self._worker.models]
        forecasters = [served.describe() for served in self._forecasters]
        return json_response({"models": models, "forecasters": forecasters, "limits": limits})

    async def show_metrics(self) -> Response:
        """Returns metrics for Prometheus."""
        self._metrics.waiting.set(self._worker.scheduler.waiting)
        self._metrics.in_progress.set(len(self._worker.scheduler.jobs))
        self._metrics.states.set(len(self._store))
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def healthz(self) -> Response:
        """Answers ok if the process can compute."""
        if self._worker.failure is not None:
            raise Refused(503, "failed", self._worker.failure)
        return json_response({"status": "ok"})

    async def readyz(self) -> Response:
        """Says whether requests are being computed."""
        await self.healthz()
        if not self._worker.ready:
            raise Refused(503, "not_ready", "the server is starting or stopping")
        return json_response({"status": "ready"})

    def _check_size(self, num: int, length: int, known: int, source: str, passes: int = 1) -> None:
        limits, cells = self._settings, num * (length + known)
        steps = f"{num} times {length + known} steps"
        most_passes = limits.max_cells // max(1, cells)
        for name, value, most, given in (
            ("num", num, limits.max_num, f"num={shown(num)} is"),
            ("length", length, limits.max_length, f"length={shown(length)} is"),
            (source, known, limits.max_length, f"the {known} steps of {source} are"),
            ("num", cells, limits.max_cells, f"{steps} are"),
            ("passes", passes, most_passes, f"{passes} passes over {steps} are"),
        ):
            if value > most:
                raise Refused(422, "too_many", f"{given} too many; use at most {most}", name)

    def _model(self, name: str | None, task: str = "continues") -> Served:
        """Returns a model; by default the first that has a task, an attribute of `Served`."""
        if name is None:
            able = (served.name for served in self._worker.models if getattr(served, task))
            name = next(able, next(iter(self._models), None))
        if name not in self._models:
            names = ", ".join(self._models) or "/v1/forecast, since only forecasters are served"
            message = f"model={shown(name)} is unknown; use {names}"
            raise Refused(404, "unknown_model", message, "model")
        return self._models[name]

    def _start(self, model: str | None, resume: str | None) -> tuple[Served, State | None]:
        """Returns the model of a request, and the state that it resumes, if any."""
        if resume is None:
            served = self._model(model)
            if not served.continues:
                raise self._only_fills(served)
            return served, None
        name, state = self._store.get(resume)
        if model not in (None, name):
            message = f"model={shown(model)} is not the model of resume; use {name!r}"
            raise invalid(message, "model")
        return self._model(name), state

    def _only_fills(self, served: Served) -> Refused:
        others = ", ".join(one.name for one in self._worker.models if one.continues)
        return invalid(
            f"model {served.name!r} has {served.model.config.given} given features and only fills "
            f"gaps; use POST /v1/fill{others and f', or another model: {others}'}",
            "model",
        )

    def _end(self, served: Served, done: Done, keep: str, began: float) -> dict[str, Any]:
        """Keeps the final state of a request, and returns where to resume, with the timing."""
        assert done.state is not None
        resume = self._store.put(served.name, done.state) if keep == "server" else None
        place = {"model": served.name, "position": done.state.position, "resume": resume}
        return {**place, **_timing(began, done)}

    async def _result(self, request: Request, calls: Calls) -> Done:
        """Returns the result of calls, which are cancelled if the client leaves."""
        result = self._worker.submit(calls)
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                self._metrics.cancelled.inc()
                raise Refused(499, "disconnected", "the client left before the answer")
            return result.result()
        finally:
            gone.cancel()
            result.cancel()
            # An error has this frame in its traceback, and the future has the error: a cycle.
            del result

    def _stream(
        self, served: Served, calls: Calls, length: int, keep: str, began: float
    ) -> Response:
        parts: asyncio.Queue[Done | None] = asyncio.Queue()
        # Submitted before the status line is sent, so that a full queue is still a 429.
        result = self._worker.submit(calls, parts.put_nowait)
        result.add_done_callback(lambda _: parts.put_nowait(None))

        async def cancel() -> None:  # runs even if the client leaves before the first event
            result.cancel()

        events = self._events(served, parts, result, length, keep, began)
        task = BackgroundTask(cancel)
        return StreamingResponse(events, 200, _STREAM_HEADERS, "text/event-stream", task)

    async def _events(
        self,
        served: Served,
        parts: "asyncio.Queue[Done | None]",
        result: "asyncio.Future[Done]",
        length: int,
        keep: str,
        began: float,
    ) -> AsyncIterator[bytes]:
        steps, made = _Steps(served), 0
        try:
            while (part := await parts.get()) is not None:
                if part.x is None:  # a part of the prompt was read
                    continue
                first, made = made, made + part.x.shape[1]
                shown = steps.show(part.x, final=made == length)
                yield _event("chunk", {"from": first, **shown, **_timing(began, part)})
            yield _event("done", self._end(served, await result, keep, began))
        except Refused as refused:
            yield _event("error", refused.body())
        except (asyncio.CancelledError, GeneratorExit):
            self._metrics.cancelled.inc()
            raise
        finally:
            result.cancel()
            del result  # breaks a cycle, as above


class _Steps:
    """Shows new steps as numbers and text. A character split over two events is in the second."""

    def __init__(self, served: Served) -> None:
        self._meta = served.meta if served.text else None
        self._decoders: list[codecs.IncrementalDecoder] = []  # one for each sequence

    def show(self, x: Tensor, final: bool) -> dict[str, Any]:
        if not x.isfinite().all():  # JSON cannot express it
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
        return {"x": x.contiguous().numpy(), "text": text}


def _count(
    asked: int | None, served: Served, data: Tensor | None, name: str, state: State | None
) -> int:
    """Returns the number of sequences; refuses data and a state that do not fit it."""
    rows = 1 if data is None else len(data)
    num = asked or (rows if state is None else state.batch)
    if rows not in (1, num):
        raise invalid(f"{name} has {rows} rows; give {num}, or one row for all", name)
    if state is None:
        return num
    if state.batch != num and (state.batch != 1 or data is not None):
        raise invalid(f"num={num} does not fit resume; use its {state.batch} rows", "num")
    if state.batch != num and shares_latents(served.model, state):
        message = (
            f"num={num} sequences would share the latents behind resume; pass num={num} to "
            "/v1/observe, or the data as a prompt to /v1/generate, so that each draws its own"
        )
        raise invalid(message, "num")
    return num


def _check_reads(state: State, refusal: str, param: str) -> None:
    try:
        check_reads(state, refusal)
    except ValueError as error:
        raise invalid(str(error), param) from None


def _noise(seed: int | None, num: int, state: State | None) -> tuple[Tensor, Tensor]:
    """Returns the seed and the row of each sequence; a state has its own."""
    seeds, rows = torch.full((num,), seed or 0), torch.arange(num)
    if state is None:
        return seeds, rows
    own = State({name: state[name].cpu() for name in ("seed", "row")})
    own = own if state.batch == num else own.repeat(num)
    return (own["seed"] if seed is None else seeds), own["row"]


def _dials(
    ask: GenerateRequest | ResumeRequest, served: Served, num: int, length: int
) -> dict[str, Any]:
    """Returns the options of `make_steps`, or refuses them."""
    if ask.recondition and not served.parallel:
        message = f"recondition is for models of kind vssm and tvae, not {served.model.config.kind}"
        raise invalid(message, "recondition")
    if ask.recondition and served.model.config.known == "any":  # windows and chunks would not agree
        raise invalid("this model cannot recondition; /v1/fill has passes", "recondition")
    # A chunk is read from the state before it, so it is made in one call.
    chunk, most = min(ask.chunk or length, length), _RECONDITIONED * served.cells
    if ask.recondition and num * chunk > most:
        message = f"{num} times {chunk} steps are too many to recondition at once"
        raise invalid(f"{message}; use a chunk of at most {max(1, most // num)}", "chunk")
    return {
        "chunk": ask.chunk if served.parallel else None,
        "recondition": ask.recondition,
        "temperature": ask.temperature,
        "observe": ask.observe,
        "every": ask.chunk or (None if served.parallel else 1) if ask.stream else None,
    }


def _steps_left(served: Served, known: int) -> int:
    try:
        return steps_left(served.meta, known)
    except ValueError as error:
        raise invalid(str(error), "length") from None


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _timing(began: float, done: Done) -> dict[str, Any]:
    total, compute = 1e3 * (time.perf_counter() - began), 1e3 * done.seconds
    return {"timing": {"compute_ms": compute, "total_ms": total, "rows": done.rows}}


def _event(name: str, body: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + json_bytes(body) + b"\n\n"
