"""The server on Ray: a replica that is killed under load costs retries, not answers."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from tests.cli.test_cli import fails
from tests.conftest import descendants
from tests.serve.test_serve import stop
from tests.serving import save_models
from vssm.serve.client import Client, ServerError
from vssm.serve.cluster import create_replica
from vssm.serve.models import Served
from vssm.serve.settings import Settings

pytest.importorskip("ray.serve", reason="needs Ray Serve: pip install 'ray[serve]'")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    (folder,) = save_models(tmp_path_factory.mktemp("models"), ["vssm"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vssm",
        "serve",
        folder,
        "--ray",
        "--replicas",
        "2",
        "--port",
        str(port),
    ]
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
        "text": True,
        "start_new_session": True,
    }
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes) as process:
        try:
            lines = iter(process.stdout.readline, "")
            assert any(line.startswith("serving vssm at") for line in lines), "it did not start"
            yield process.pid, f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(90) == 0


def test_wrong_ways_to_start(capsys):
    assert "replicas=3" in fails(
        capsys, "serve", "x", "--ray", "--replicas", "3", "--max-replicas", "2"
    )
    assert "--token-file" in fails(capsys, "serve", "x", "--ray", "--host", "0.0.0.0")


def test_a_replica_whose_worker_failed_ends(tmp_path, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(
        "vssm.serve.cluster.os._exit", lambda code: ended.set() if code == 1 else None
    )
    app = create_replica(save_models(tmp_path, ["vssm"]), "cpu", Settings(), None, bytes(32))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        assert client.post("/v1/generate", json={"length": 2}).status_code == 200
        monkeypatch.setattr(Served, "generate", stop)
        reply = client.post("/v1/generate", json={"length": 2})
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "failed")
        assert ended.wait(10)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_replica_costs_retries_not_answers(cluster):
    process, url = cluster
    with Client(url, retries=20) as client:
        expected = [client.generate(num=2, length=6, seed=seed).x for seed in range(5)]
        halfway = client.generate(num=1, length=3, seed=7)
        assert halfway.resume.startswith("s."), "any replica can go on from it"
        after = client.resume(halfway.resume, length=4).x
        with pytest.raises(ServerError, match="several processes"):
            client.generate(keep="server")
        assert len(list(client.stream(length=6, chunk=2))) == 4
    assert (
        httpx.get(f"{url}/healthz", headers={"host": "example.org"}, trust_env=False).status_code
        == 421
    )
    pids = set(descendants(process, b"ray::ServeReplica:vssm"))
    assert len(pids) == 2
    answers, end = Counter(), time.monotonic() + 8

    def ask(number):
        with Client(url, timeout=20, retries=20) as client:
            while time.monotonic() < end:
                number += 1
                x = client.generate(num=2, length=6, seed=number % 5).x
                answers[np.array_equal(x, expected[number % 5])] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(2)
    before = answers[True]
    os.kill(min(pids), signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "nothing hangs"
    assert answers[False] == 0
    assert answers[True] > before > 0
    with Client(url, retries=20) as client:
        assert np.array_equal(client.resume(halfway.resume, length=4).x, after)
