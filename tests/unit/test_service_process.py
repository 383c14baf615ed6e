"""The engine-core process as its supervisor and its clients see it: ready line, signals, losses, exit statuses.

Real processes with the fake device. Where a request must still be open, the worker is stopped (SIGSTOP) first, so that
no timing decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from greenlane.engine.v1 import engine_pb2 as pb
from greenlane.engine.v1 import engine_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.unit.core_process import GUARD_S, MODEL, Core, guarded, logged

pytestmark = pytest.mark.e2e
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


class Client:
    """A frontend's view: one session and one health watch on one connection."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.engine = engine_pb2_grpc.EngineStub(channel)
        self.watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        self.session = self.engine.Session()
        self.journal: list[str] = []

    async def open(self) -> None:
        """Say hello, see health, send a request of number 1 and see it accepted."""
        assert (await guarded(self.watch.read())).status == SERVING
        ids = np.arange(1, 40, dtype="<i4").tobytes()
        sampling = pb.SamplingParams(max_tokens=1500, ignore_eos=True)
        add = pb.AddRequest(number=1, prompt_ids=ids, sampling=sampling)
        await self.session.write(pb.SessionRequest(hello=pb.Hello(protocol_version=1), adds=[add]))
        assert (await guarded(self.session.read())).HasField("welcome")
        while not (await guarded(self.session.read())).output.accepted:
            pass

    async def last_words(self) -> pb.Finish:
        """The request's last word; what health said before it is in the journal."""

        async def health() -> None:
            assert (await self.watch.read()).status == NOT_SERVING
            self.journal.append("not serving")

        watching = asyncio.create_task(health())
        finishes: list[pb.Finish] = []
        while not finishes:
            message = await guarded(self.session.read())
            assert isinstance(message, pb.SessionResponse), "the session ended without a last word"
            finishes += message.output.finishes
            if message.HasField("output"):
                await self.session.write(pb.SessionRequest(ack=message.output.sequence))
        self.journal.append("finish")
        await guarded(watching)
        return finishes[0]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    leftovers = [process for process in psutil.process_iter() if str(tmp_path) in " ".join(_command(process))]
    assert leftovers == [], "processes were left behind"


def _command(process: psutil.Process) -> list[str]:
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.Error:
        return []


@contextlib.asynccontextmanager
async def serving(folder: Path, *flags: str) -> AsyncIterator[tuple[Core, Client]]:
    core = Core(folder, *flags)
    try:
        address = (await core.ready())["grpc"]
        async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            client = Client(channel)
            yield core, client
            client.watch.cancel()
            client.session.cancel()
    finally:
        core.close()


# ------------------------------ a good life


async def test_a_core_announces_itself_serves_and_leaves_nothing(folder: Path) -> None:
    """Red when the ready line comes before it serves, SIGTERM isn't status 0, or sockets or workers are left."""
    async with serving(folder) as (core, client):
        info = await guarded(client.engine.GetInfo(pb.GetInfoRequest()))
        assert (info.state, info.device) == (pb.ENGINE_STATE_SERVING, "fake")
        worker = core.worker
        core.process.terminate()
        assert await core.ends_with() == 0
        assert not worker.is_running()
        assert core.files() == ["stderr"]


async def test_the_proxy_variables_of_a_shell_are_not_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a local connection goes to a proxy (case 19)."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:9")
    async with serving(folder) as (_, client):
        await client.open()


# ------------------------------ signals


async def test_the_first_signal_drains_and_the_second_stops_at_once(folder: Path) -> None:
    """Red when a drain drops open requests, a second signal waits for them, or they end without a word."""
    async with serving(folder, "--worker-timeout=600") as (core, client):
        core.worker.suspend()
        await client.open()
        core.process.send_signal(signal.SIGINT)
        assert (await guarded(client.watch.read())).status == NOT_SERVING
        code = await guarded(client.engine.Session().code())
        assert code is grpc.StatusCode.UNAVAILABLE
        await client.session.write(
            pb.SessionRequest(adds=[pb.AddRequest(number=2, prompt_ids=b"\1\0\0\0", sampling=pb.SamplingParams())])
        )
        finishes: list[pb.Finish] = []
        while not finishes:
            finishes += (await guarded(client.session.read())).output.finishes
        assert (finishes[0].number, finishes[0].error.reject_reason) == (2, pb.REJECT_REASON_DRAINING)
        core.process.send_signal(signal.SIGINT)
        finishes = []
        while not finishes:
            finishes += (await guarded(client.session.read())).output.finishes
        assert (finishes[0].number, finishes[0].error.code) == (1, grpc.StatusCode.UNAVAILABLE.value[0])
        assert await core.ends_with() == 0
        assert not core.worker.is_running()


async def test_an_open_request_outlives_the_first_signal(folder: Path) -> None:
    """Red when a drain cuts off what would have finished."""
    async with serving(folder, "--worker-timeout=600") as (core, client):
        core.worker.suspend()
        await client.open()
        core.process.terminate()
        assert (await guarded(client.watch.read())).status == NOT_SERVING
        core.worker.resume()
        finishes: list[pb.Finish] = []
        while not finishes:
            message = await guarded(client.session.read())
            finishes += message.output.finishes
            if message.HasField("output"):
                await client.session.write(pb.SessionRequest(ack=message.output.sequence))
        assert (finishes[0].reason, finishes[0].output_tokens) == (pb.FINISH_REASON_LENGTH, 1500)
        assert await core.ends_with() == 0


async def test_a_signal_while_starting_ends_the_start(folder: Path) -> None:
    """Red when Ctrl-C must wait for a model to load, or for a worker that nobody starts."""
    sockets = folder / "sockets"
    sockets.mkdir(mode=0o700)
    core = Core(folder, f"--worker-address=unix:{sockets / 'worker.sock'}")
    try:
        address = f"unix:{folder / 'grpc.sock'}"
        async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            info = await guarded(stub.GetInfo(pb.GetInfoRequest(), wait_for_ready=True))
            assert info.state == pb.ENGINE_STATE_STARTING
        core.process.terminate()
        assert await core.ends_with() == 0
    finally:
        core.close()


async def test_who_waits_for_the_other_says_so(folder: Path) -> None:
    """Red when an engine core and a worker that are started by hand wait in silence, name a command that doesn't bring
    the other one, or don't stop waiting as they say; or when one speaks of waiting that has started its worker itself.
    """
    sockets = folder / "sockets"
    sockets.mkdir(mode=0o700)
    address = sockets / "worker.sock"
    core = Core(folder, f"--worker-address=unix:{address}")
    workers: list[psutil.Popen] = []
    try:
        waiting = await asyncio.to_thread(core.logged, "waiting_for_worker")
        assert waiting["stop"] == "Ctrl-C or SIGTERM"
        program, *arguments = waiting["start"].split()
        assert program == "greenlane"
        with (folder / "worker.log").open("w") as log:
            workers.append(psutil.Popen([sys.executable, "-P", "-m", "engine_core", *arguments], stderr=log))
        await core.announced()
        core.process.terminate()
        assert await core.ends_with() == 0
        with (folder / "alone.log").open("w") as log:
            workers.append(psutil.Popen([sys.executable, "-P", "-m", "engine_core", *arguments], stderr=log))
        waiting = await asyncio.to_thread(logged, folder / "alone.log", "waiting_for_engine_core", workers[1])
        assert waiting["start"] == f"greenlane engine --model FOLDER --worker-address unix:{address}"
        assert waiting["stop"] == "Ctrl-C or SIGTERM"
        workers[1].send_signal(signal.SIGINT)
        assert [worker.wait(GUARD_S) for worker in workers] == [0, -signal.SIGINT]
    finally:
        core.close()
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait(GUARD_S)


async def test_a_worker_of_its_own_is_not_waited_for(folder: Path) -> None:
    """Red when a server that starts its worker itself tells people to start one."""
    async with serving(folder) as (core, _):
        assert "waiting_for" not in core.stderr()


# ------------------------------ losses


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "stopped answering heartbeats")]
)
async def test_a_lost_worker_fails_everything_open_and_the_core_exits(
    folder: Path, number: signal.Signals, cause: str
) -> None:
    """Red when a request hangs, health turns late, or the core lives on as a shell that answers 503 (case 8)."""
    async with serving(folder, "--worker-timeout=2", f"--crash-dir={folder / 'crash'}") as (core, client):
        core.worker.suspend()
        await client.open()
        core.worker.send_signal(number)
        finish = await client.last_words()
        assert (finish.reason, finish.error.code) == (pb.FINISH_REASON_ERROR, grpc.StatusCode.UNAVAILABLE.value[0])
        assert cause in finish.error.message
        assert client.journal == ["not serving", "finish"]
        assert await core.ends_with() == 1
        assert not core.worker.is_running()
        (report,) = (folder / "crash").iterdir()
        assert cause in json.loads(report.read_text())["cause"]


async def test_a_killed_core_takes_its_worker_along(folder: Path) -> None:
    """Red when a worker outlives its core and keeps the GPU (case 6)."""
    async with serving(folder) as (core, client):
        await client.open()
        core.process.kill()
        await guarded(asyncio.to_thread(psutil.wait_procs, [core.worker], GUARD_S))
        assert not core.worker.is_running()


async def test_a_core_dies_with_its_supervisor(folder: Path) -> None:
    """Red when PR_SET_PDEATHSIG isn't set at the start: the core would be an orphan (case 6)."""
    code = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, *sys.argv[1:], f'--parent-pid={os.getpid()}'])\n"
        "time.sleep(600)\n"
    )
    flags = (f"--model={MODEL}", "--device=fake", "--load-format=dummy", f"--address=unix:{folder / 'grpc.sock'}")
    parent = psutil.Popen(
        [sys.executable, "-c", code, "-P", "-m", "engine_core", "engine", *flags], stderr=subprocess.DEVNULL
    )
    try:
        address = f"unix:{folder / 'grpc.sock'}"
        async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            await guarded(stub.GetInfo(pb.GetInfoRequest(), wait_for_ready=True))
        children = parent.children(recursive=True)
        assert children
    finally:
        parent.kill()
        parent.wait(GUARD_S)
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, GUARD_S)
    for process in alive:
        process.kill()
    assert alive == []


# ------------------------------ what can't be served


async def refused(folder: Path, *flags: str) -> str:
    """What stderr says when the core refuses to serve, with status 2."""
    core = Core(folder, *flags)
    try:
        assert await core.ends_with() == 2, core.stderr()
        return core.stderr()
    finally:
        core.close()


async def test_a_folder_of_weights_that_misses_one_is_refused(folder: Path) -> None:
    """Red when what the worker refuses to load is retried for ever: the status must say that a restart can't help."""
    broken = folder / "model"
    broken.mkdir()
    for path in MODEL.iterdir():
        if path.suffix != ".safetensors":
            (broken / path.name).write_bytes(path.read_bytes())
    message = await refused(folder, f"--model={broken}", "--device=cpu", "--load-format=auto")
    assert "safetensors" in message.splitlines()[-1]
    assert message.splitlines()[-1].startswith("error: ")


async def test_a_port_in_use_is_refused(folder: Path) -> None:
    """Red when a second core shares a port or restarts again and again (case 12)."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = await asyncio.to_thread(
            subprocess.run,
            [
                *(sys.executable, "-P", "-m", "engine_core", "engine", f"--model={MODEL}", "--device=fake"),
                *("--load-format=dummy", f"--address=127.0.0.1:{port}"),
            ],
            capture_output=True,
            text=True,
            timeout=GUARD_S,
        )
    assert result.returncode == 2
    assert f"can't listen on 127.0.0.1:{port}" in result.stderr


async def test_a_file_at_the_socket_path_is_refused_and_kept(folder: Path) -> None:
    """Red when gRPC unlinks what lies in its way (case 11)."""
    (folder / "grpc.sock").write_text("precious")
    assert "is no socket" in await refused(folder)
    assert (folder / "grpc.sock").read_text() == "precious"


async def test_a_leftover_socket_is_no_obstacle(folder: Path) -> None:
    """Red when a core that was killed can't be started again (case 11)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(folder / "grpc.sock"))
    async with serving(folder) as (_, client):
        await client.open()
