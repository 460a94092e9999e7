"""Puts a server on this machine under load and records how it behaves.

    python experiments/serve_load.py --out results/serve_xeon-2cores.json

There are three parts, each with its own server process; the first two have 64 clients:

- mixed requests for a minute (one sample, sixteen, prompted, chunked and re-conditioned, streamed,
  resumed, step by step) against a queue that is shorter than the number of clients; every answer is
  compared with the same request sent alone
- single samples for ten seconds, with and without batching, in turns
- large requests at twice the rate that the server can answer, while a client at another address
  asks for single steps: the share of time that ends in answers, and the time of the single steps
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch

import vssm
from vssm.runs.results import result, write_result

CLIENTS = 64
ROUNDS = 5


class Connection:
    """A bare HTTP client, which leaves the processor to the server."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        self.port, self.address = port, address
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Sends a request and returns the status and the body."""
        if self.streams is None:
            own = (self.address, 0)
            self.streams = await asyncio.open_connection(
                "127.0.0.1", self.port, limit=2**28, local_addr=own
            )
        reader, writer = self.streams
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if size := re.search(r"content-length: (\d+)", head):
            reply = await reader.readexactly(int(size[1]))
        else:
            reply = b""
            while size := int(await reader.readline(), 16):
                reply += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        if "connection: close" in head:
            self.close()
        return int(head.split(" ", 2)[1]), reply

    def close(self) -> None:
        """Ends the connection."""
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


@contextlib.contextmanager
def server(folders: list[str], *options: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """Starts a server and yields its process and port once it is ready."""
    command = [sys.executable, "-m", "vssm", "serve", *folders, "--port", "0", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            line = process.stdout.readline()
            port = int(line.split("http://127.0.0.1:")[1].split()[0])
            _until_ready(port)
            yield process, port
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _until_ready(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10):
            return
        time.sleep(0.1)
    raise TimeoutError("the server did not become ready")


def requests(names: list[str], features: int) -> list[dict[str, Any]]:
    """Returns the mixed requests; each has exactly one right answer."""
    vssm_name, *others = names
    prompt = [[(7 * i + 3 * j) % 11 / 10 for j in range(features)] for i in range(14)]
    made: list[dict[str, Any]] = []
    for seed in range(8):
        made += [
            {"num": 1, "seed": seed, "keep": "none"},
            {"num": 16, "seed": seed},
            {"num": 1, "seed": seed, "prompt": prompt, "length": 14, "keep": "none"},
            {
                "num": 4,
                "seed": seed,
                "prompt": prompt,
                "length": 14,
                "chunk": 2,
                "recondition": True,
                "keep": "none",
            },
            {"num": 1, "seed": seed, "chunk": 7, "stream": True, "keep": "none"},
        ]
        made += [{"num": 1, "seed": seed, "model": name, "keep": "none"} for name in others]
    return [{"model": vssm_name, **request} for request in made]


def steps(reply: bytes) -> list[Any]:
    """Returns x of an answer, joined when it was streamed."""
    if reply.startswith(b"{"):
        return json.loads(reply)["x"]
    datas = [json.loads(line[6:]) for line in reply.split(b"\n") if line.startswith(b"data: ")]
    rows = zip(*(data["x"] for data in datas if "x" in data), strict=True)
    return [[step for part in parts for step in part] for parts in rows]


async def alone(port: int, bodies: list[dict[str, Any]]) -> list[list[Any]]:
    """Sends requests one after the other and returns their answers."""
    connection, answers = Connection(port), []
    for body in bodies:
        status, reply = await connection.post("/v1/generate", body)
        assert status == 200, reply[:200]
        answers.append(steps(reply))
    connection.close()
    return answers


async def mixed_load(
    process: subprocess.Popen, port: int, names: list[str], seconds: float, features: int = 28
) -> dict[str, float]:
    """Sends mixed requests from all clients and compares every answer."""
    bodies = requests(names, features)
    expected = await alone(port, bodies)
    statuses: Counter[int] = Counter()
    lost = differing = resumed = 0
    times: list[float] = []
    end = time.perf_counter() + seconds
    memory: list[float] = []

    async def client(number: int) -> None:
        nonlocal lost, differing, resumed
        connection, turn = Connection(port), number
        while time.perf_counter() < end:
            turn += 1
            which = turn * 11 % len(bodies)  # visits them all
            began = time.perf_counter()
            try:
                status, reply = await asyncio.wait_for(
                    connection.post("/v1/generate", bodies[which]), 60
                )
            except (TimeoutError, OSError, asyncio.IncompleteReadError):
                lost += 1
                connection.close()
                continue
            statuses[status] += 1
            if status == 429:
                await asyncio.sleep(0.05 + 0.01 * (number % 10))
                continue
            times.append(time.perf_counter() - began)
            if status == 200:
                differing += not np.allclose(steps(reply), expected[which], rtol=1e-4, atol=1e-5)
                if "keep" not in bodies[which]:
                    handle = json.loads(reply)["resume"]
                    status, _ = await connection.post("/v1/resume", {"resume": handle, "length": 4})
                    statuses[status] += 1
                    resumed += status == 200
        connection.close()

    async def watch() -> None:
        while time.perf_counter() < end:
            memory.append(resident_mib(process.pid))
            await asyncio.sleep(0.5)

    await asyncio.gather(watch(), *(client(number) for number in range(CLIENTS)))
    half = len(memory) // 2
    quantiles = statistics.quantiles(times, n=100)
    return {
        "requests": sum(statuses.values()),
        "answered": statuses[200],
        "refused_429": statuses[429],
        "errors": sum(count for status, count in statuses.items() if status not in (200, 429)),
        "lost": lost,
        "differing": differing,
        "resumed": resumed,
        "p50_ms": 1e3 * quantiles[49],
        "p99_ms": 1e3 * quantiles[98],
        "memory_mib": memory[-1],
        # Warm-up and the filling of the store of states are over by half-time.
        "memory_growth_mib": statistics.median(memory[-10:])
        - statistics.median(memory[half : half + 10]),
    }


def resident_mib(pid: int) -> float:
    """Returns the memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def singles(port: int, name: str, seconds: float, clients: int = CLIENTS) -> float:
    """Returns how many single-sample requests are answered per second."""
    answered, began = 0, time.perf_counter()
    end = began + seconds

    async def client(number: int) -> None:
        nonlocal answered
        connection, seed = Connection(port), number
        while time.perf_counter() < end:
            seed += clients
            body = {"num": 1, "seed": seed, "model": name, "keep": "none"}
            status, _ = await connection.post("/v1/generate", body)
            answered += status == 200
        connection.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return answered / (time.perf_counter() - began)


def speedups(folders: list[str], names: list[str], seconds: float) -> dict[str, float]:
    """Compares the throughput of single samples with batching and without."""
    alone = ("--limits.max-rows", "1")
    with server(folders) as (_, batched), server(folders, *alone) as (_, unbatched):
        seen: dict[tuple[int, str], list[float]] = {}
        for _ in range(ROUNDS):  # in turns, so that a disturbance meets both
            for port in (batched, unbatched):
                for name in names:
                    rate = asyncio.run(singles(port, name, seconds / ROUNDS))
                    seen.setdefault((port, name), []).append(rate)
    # The first round warms up.
    rates = {case: statistics.mean(values[1:]) for case, values in seen.items()}
    metrics = {}
    for name, label in zip(names, ("", "ssm_", "transformer_"), strict=False):
        metrics[f"{label}single_requests_per_second"] = rates[batched, name]
        metrics[f"{label}single_requests_per_second_unbatched"] = rates[unbatched, name]
        metrics[f"{label}batching_speedup"] = rates[batched, name] / rates[unbatched, name]
    return metrics


async def overload(
    process: subprocess.Popen, port: int, large: dict[str, Any], seconds: float
) -> dict[str, float]:
    """Sends large requests at twice the possible rate, and single steps from another address."""
    began = time.perf_counter()
    for _ in range(3):
        await ask(port, large)
    alone = (time.perf_counter() - began) / 3
    memory, statuses, times = [resident_mib(process.pid)], Counter(), []
    began = time.perf_counter()
    ends: list[float] = []

    async def send(number: int) -> None:
        await asyncio.sleep(number * alone / 2)
        status = await ask(port, {**large, "seed": number})
        statuses[status] += 1
        if status == 200:
            ends.append(time.perf_counter() - began)

    async def small() -> None:
        connection = Connection(port, "127.0.0.2")
        while time.perf_counter() - began < seconds:
            since = time.perf_counter()
            status, _ = await connection.post(
                "/v1/generate", {"num": 1, "length": 1, "seed": len(times), "keep": "none"}
            )
            statuses["small", status] += 1
            times.append(time.perf_counter() - since)
            memory.append(resident_mib(process.pid))
            await asyncio.sleep(0.1)
        connection.close()

    await asyncio.gather(small(), *(send(number) for number in range(int(2 * seconds / alone))))
    await asyncio.sleep(2)
    return {
        "overload_alone_seconds": alone,
        "overload_requests": int(2 * seconds / alone),
        "overload_answered": statuses[200],
        "overload_refused_429": statuses[429],
        "overload_504": statuses[504],
        "overload_goodput": statuses[200] * alone / max(seconds, *ends),
        "overload_small_requests": len(times),
        "overload_small_failed": len(times) - statuses["small", 200],
        "overload_small_p50_ms": 1e3 * statistics.median(times),
        "overload_small_p99_ms": 1e3 * statistics.quantiles(times, n=100)[98],
        "overload_memory_before_mib": memory[0],
        "overload_memory_peak_mib": max(memory),
        "overload_memory_after_mib": resident_mib(process.pid),
    }


async def ask(port: int, body: dict[str, Any]) -> int:
    """Sends a request on a new connection and returns the status."""
    connection = Connection(port)
    try:
        return (await connection.post("/v1/generate", body))[0]
    except (OSError, asyncio.IncompleteReadError):
        return 0
    finally:
        connection.close()


def fresh_models(folder: Path) -> list[str]:
    """Saves untrained models in the sizes of the shipped ones; weights do not change the time."""
    places = []
    for kind, width in (("vssm", 160), ("ssm", 256), ("transformer", 192)):
        torch.manual_seed(0)
        config = vssm.ModelConfig(kind=kind, features=28, width=width)
        places.append(str(folder / kind))
        vssm.save(vssm.build(config), places[-1])
    return places


def main() -> None:
    parser = argparse.ArgumentParser(description="Loads a server on this machine.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--single-seconds", type=float, default=10.0)
    parser.add_argument("--only", choices=["mixed", "single", "overload"], default=None)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        folders = fresh_models(Path(folder))
        names = [Path(place).name for place in folders]
        if options.only in (None, "mixed"):
            limits = ("--limits.max-queue", "48", "--limits.resume-mib", "64")
            with server(folders, *limits) as (process, port):
                metrics |= asyncio.run(mixed_load(process, port, names, options.seconds))
        if options.only in (None, "single"):
            metrics |= speedups(folders, names, options.single_seconds)
        if options.only in (None, "overload"):
            large = {"model": "transformer", "num": 64, "length": 256, "keep": "none"}
            with server(folders) as (process, port):
                metrics |= asyncio.run(overload(process, port, large, 2 * options.seconds))
    for name, value in metrics.items():
        print(f"{name:45} {value:10.2f}")
    if options.out is not None:
        config = {"clients": CLIENTS, "seconds": options.seconds, "max_queue": 48, "resume_mib": 64}
        write_result(
            options.out, result("serve", "python experiments/serve_load.py", config, metrics)
        )


if __name__ == "__main__":
    main()
