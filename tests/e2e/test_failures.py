"""Processes killed and frozen while they serve: what open calls get, how soon, and what is left afterwards.

Every bound here is one that the product states: 2 s for the end of calls after a death, the flag's timeout and 2 s for
a frozen process, 5 s until no process of a lost part is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import grpc
import httpx
import psutil
import pytest

from scripts.serving import GREENLANE, TINY
from tests.e2e.conftest import MakeServer
from tests.e2e.harness import GUARD_S, SMALL, OpenCall, Server, alive, long_request, serving, until

pytestmark = pytest.mark.e2e

DEATH_S = 2.0
ORPHANS_S = 5.0
SILENCE_S = 5.0
"""Default of --worker-timeout and --engine-timeout; a shorter one would take a busy machine for a frozen process."""


def hurt(server: Server, role: str, number: signal.Signals) -> float:
    """Signal the process of that role; when."""
    pid = server.pid(role)
    now = time.monotonic()
    os.kill(pid, number)
    return now


def assert_serves(server: Server) -> None:
    """Serving again, shown by an answer."""
    until(lambda: server.health() == 200, "serving again")
    assert server.complete().json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("role", ["worker", "engine"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_lost_worker_or_core(make_server: MakeServer, role: str, number: signal.Signals) -> None:
    """Red if a call outlives its engine core, ends with another status than UNAVAILABLE, or ends before health turns;
    if a process of the lost core stays; or if `serve` doesn't serve again by itself."""
    server = make_server()
    lost = [pid for pid, each in server.tree().items() if each in ("worker", "engine")]
    frontend = server.pid("frontend")
    calls = [OpenCall(server.grpc, long_request()) for _ in range(3)]
    began = hurt(server, role, number)
    bound = DEATH_S if number is signal.SIGKILL else SILENCE_S + DEATH_S
    for call in calls:
        call.join()
        assert call.status is grpc.StatusCode.UNAVAILABLE, call.details
        assert call.health_after is False, "health was still SERVING after a call had failed"
        assert call.ended_at - began < bound
    with server.client() as client:
        assert client.get("/health").json()["status"] in ("starting", "serving"), "`serve` starts it again"
    until(lambda: not alive(lost), "the lost core's processes are gone")
    assert time.monotonic() - began < bound + ORPHANS_S
    assert_serves(server)
    assert serving(server.grpc)
    assert server.pid("frontend") == frontend, "the frontend was restarted too"


def test_frozen_frontend_harms_only_itself(make_server: MakeServer) -> None:
    """Red if a frozen frontend holds up another frontend's stream, or is not replaced."""
    server = make_server("--frontends=2")
    other = server.call_on(2, long_request(max_tokens=600))
    os.kill(server.ready["pids"]["frontend 1"], signal.SIGSTOP)
    assert other.join().status is grpc.StatusCode.OK
    assert other.finish_reason == "length"
    until(lambda: alive([server.ready["pids"]["frontend 1"]]) == [], "the frozen frontend was killed")
    assert_serves(server)


def test_killed_frontend_costs_its_own_requests(make_server: MakeServer) -> None:
    """Red if a frontend's death leaves its requests running, or touches those of another frontend."""
    server = make_server("--frontends=2")
    other = server.call_on(2, long_request(max_tokens=1200))
    own = server.call_on(1, long_request())
    began = time.monotonic()
    os.kill(server.ready["pids"]["frontend 1"], signal.SIGKILL)
    assert own.join().status is grpc.StatusCode.UNAVAILABLE
    assert own.ended_at - began < DEATH_S
    assert other.join().status is grpc.StatusCode.OK
    assert other.finish_reason == "length"
    until(server.idle, "the killed frontend's request was aborted")
    assert server.stats().counters.finished_length == 1
    assert_serves(server)


def test_killed_supervisor_leaves_no_orphans(make_server: MakeServer) -> None:
    """Red if any process outlives its supervisor: a worker would keep the GPU's memory."""
    server = make_server()
    pids = list(server.tree())
    assert len(pids) == 5, "supervisor, engine core, worker, frontend and its templates"
    call = OpenCall(server.grpc, long_request())
    began = hurt(server, "supervisor", signal.SIGKILL)
    server.process.wait()
    assert call.join().status is grpc.StatusCode.UNAVAILABLE
    until(lambda: not alive(pids), "no orphans")
    assert time.monotonic() - began < ORPHANS_S


def test_crash_loop_ends_with_the_cause(make_server: MakeServer) -> None:
    """Red if a core that keeps dying is restarted for ever, or if `serve` then reports success."""
    server = make_server("--device=fake")
    engines: set[int] = set()
    while server.process.poll() is None:
        current = {pid for pid, role in server.tree().items() if role == "engine"} - engines
        for pid in current:
            os.kill(pid, signal.SIGKILL)
        engines |= current
        time.sleep(0.05)
    assert server.process.returncode == 1
    assert len(engines) == 6
    assert "was killed by SIGKILL, after 5 restarts within 5 minutes" in server.logged()


# ------------------------------ stopping


def test_first_signal_lets_requests_finish(make_server: MakeServer) -> None:
    """Red if a drain cuts off an open stream, or accepts new requests meanwhile."""
    server = make_server()
    call = OpenCall(server.grpc, long_request(max_tokens=600))
    server.process.send_signal(signal.SIGINT)
    until(lambda: server.health() != 200, "health turned")
    with pytest.raises(httpx.HTTPError):
        server.complete().raise_for_status()
    assert call.join().status is grpc.StatusCode.OK
    assert call.finish_reason == "length"
    assert server.process.wait() == 0


def test_a_drain_has_a_bound(make_server: MakeServer) -> None:
    """Red if --drain-timeout isn't kept to, new requests aren't told when to come again, or what is cut off is cut off
    without a word."""
    server = make_server("--drain-timeout=2")
    call = OpenCall(server.grpc, long_request(max_tokens=1900))
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    until(lambda: server.health() != 200, "health turned")
    with server.client() as client:
        assert client.get("/health").json()["status"] == "draining"
    refused = server.complete()
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert call.join().status is grpc.StatusCode.UNAVAILABLE
    assert 2.0 <= call.ended_at - began < 2.0 + DEATH_S
    assert server.process.wait() == 0


def test_second_signal_stops_at_once(make_server: MakeServer) -> None:
    """Red if an impatient person waits for a long request."""
    server = make_server()
    pids = list(server.tree())
    call = OpenCall(server.grpc, long_request(max_tokens=1900))
    server.process.send_signal(signal.SIGINT)
    until(lambda: not serving(server.grpc), "draining")
    began = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    assert call.join().status is grpc.StatusCode.UNAVAILABLE
    server.process.wait()
    assert not alive(pids)
    assert time.monotonic() - began < ORPHANS_S


def test_a_log_that_nobody_reads_stops_nothing() -> None:
    """Red if a server whose output was piped to something that has gone hangs, doesn't serve, or can't be stopped; and,
    as Python buffers that output unless told otherwise, if a process ends with a status of its own for that reason."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    flags = [f"--model={TINY}", *SMALL, "--device=fake", "--port=0", "--grpc-port=0"]
    ready_fd, ready_end = os.pipe()
    process = subprocess.Popen(
        [*GREENLANE, "serve", *flags, f"--ready-fd={ready_end}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(ready_end,),
        env=environment,
    )
    os.close(ready_end)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        with os.fdopen(ready_fd) as pipe:
            http = json.loads(pipe.readline())["http"][0]
        assert httpx.get(f"{http}/health", trust_env=False).status_code == 200
        worker = next(
            each for each in psutil.Process(process.pid).children(recursive=True) if "worker" in each.cmdline()
        )
        worker.kill()
        until(lambda: httpx.get(f"{http}/health", trust_env=False).status_code != 200, "the loss was noticed")
        until(lambda: httpx.get(f"{http}/health", trust_env=False).status_code == 200, "serving again")
        process.terminate()
        assert process.wait(GUARD_S) == 0
    finally:
        process.kill()
        process.wait()
