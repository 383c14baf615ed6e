"""A real `greenlane serve` for tests: started on free ports, looked into, hurt and stopped."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
from greenlane.engine.v1 import engine_pb2, engine_pb2_grpc
from greenlane.text.v1 import text_pb2, text_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from scripts.serving import TINY, start

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--device=cpu", "--threads=1", "--kv-cache-memory=64MiB", "--max-num-seqs=64"]
GUARD_S = 120.0
"""Hang guard of every wait; no test's verdict depends on it."""
CHANNEL_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
"""A connection for each channel, so that frontends that share a port get some each."""


class Server:
    """One supervised server. Addresses are those of its first frontend. Raises ServeError when it doesn't start."""

    def __init__(self, log: Path, *flags: str, model: Path = TINY) -> None:
        self.log = log
        serving = start(model, log, ["--served-model-name=tiny", *SMALL, *flags])
        self.process = serving.process
        self.ready = serving.ready
        self.http, self.grpc, self.engine = serving.http, serving.grpc, serving.engine
        self.vllm = str(self.ready.get("vllm", [""])[0])
        """Empty without --vllm-grpc-port."""

    def logged(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    # ------------------------------ processes

    def tree(self) -> dict[int, str]:
        """pid → role of every living process of this server."""
        tree = {self.process.pid: "supervisor"}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.status() != psutil.STATUS_ZOMBIE:
                        tree[child.pid] = role(child.cmdline())
        return tree

    def pid(self, wanted: str) -> int:
        """The one living process of that role: supervisor, engine, worker or frontend."""
        (pid,) = [pid for pid, role in self.tree().items() if role == wanted]
        return pid

    def stop(self) -> int:
        """SIGTERM, and at last SIGKILL; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(GUARD_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    # ------------------------------ clients

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.http, timeout=GUARD_S, trust_env=False)

    def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "It is a truth", "max_tokens": 4, "temperature": 0, **fields}
        with self.client() as client:
            return client.post("/v1/completions", json=body)

    def health(self) -> int:
        """HTTP status of /health; 0 when nobody answers."""
        try:
            return httpx.get(f"{self.http}/health", timeout=GUARD_S, trust_env=False).status_code
        except httpx.TransportError:
            return 0

    def stats(self) -> engine_pb2.GetStatsResponse:
        with grpc.insecure_channel(self.engine, options=CHANNEL_OPTIONS) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            stats: engine_pb2.GetStatsResponse = stub.GetStats(engine_pb2.GetStatsRequest(), timeout=GUARD_S)
            return stats

    def metrics(self) -> dict[tuple[str, ...], float]:
        """A scrape: values by name and labels' values."""
        with self.client() as client:
            text = client.get("/metrics").text
        families = text_string_to_metric_families(text)
        return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}

    def call_on(self, frontend: int, request: text_pb2.GenerateRequest) -> OpenCall:
        """A call on that one of several frontends, counted from 1; the kernel chooses, so this may take some tries."""
        opened = ("greenlane_frontend_open_requests", str(frontend))
        for _ in range(64):
            before = self.metrics()[opened]
            call = OpenCall(self.grpc, request)
            if self.metrics()[opened] > before:
                return call
            call.call.cancel()
            call.join()
        raise AssertionError(f"no connection reached frontend {frontend}")

    def idle(self) -> bool:
        """Whether no sequence runs or waits and no page is referenced or retiring."""
        gauges = self.stats().gauges
        return not (gauges.running or gauges.waiting or gauges.pages_referenced or gauges.pages_retiring)


def role(command: list[str]) -> str:
    """What a process of ours does, by its command line."""
    roles = (
        ("frontend", "frontend"),
        ("engine", "engine"),
        ("worker", "worker"),
        ("frontend.template_child", "templates"),
    )
    for module, name in roles:
        if module in command[:6]:
            return name
    return " ".join(command)


def until(condition: Callable[[], object], what: str, guard_s: float = GUARD_S) -> float:
    """Wait for a condition; the seconds it took. Fails with `what` when the hang guard passes."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > guard_s:
            raise AssertionError(f"after {guard_s:.0f} s still not: {what}")
        time.sleep(0.02)
    return time.monotonic() - began


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that still run (a zombie doesn't)."""
    living = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                living.append(pid)
    return living


@contextlib.contextmanager
def text_stub(address: str) -> Iterator[text_pb2_grpc.TextStub]:
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        yield text_pb2_grpc.TextStub(channel)


@contextlib.contextmanager
def health_stub(address: str) -> Iterator[health_pb2_grpc.HealthStub]:
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def serving(address: str) -> bool:
    """Whether grpc.health.v1 says SERVING."""
    with health_stub(address) as stub:
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=GUARD_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def long_request(prompt: str = "It is a truth", max_tokens: int = 1500) -> text_pb2.GenerateRequest:
    """One that outlives whatever a test does to its server."""
    sampling = text_pb2.Sampling(max_tokens=max_tokens, ignore_eos=True, temperature=1.0, seed=7)
    return text_pb2.GenerateRequest(prompt=prompt, sampling=sampling)


class OpenCall:
    """A streamed text gRPC call on a thread of its own: known to be under way, then watched to its end."""

    def __init__(self, address: str, request: text_pb2.GenerateRequest) -> None:
        self.text = ""
        self.finish_reason = ""
        self.status = grpc.StatusCode.OK
        self.details = ""
        self.ended_at = 0.0
        """time.monotonic() of the end."""
        self.health_after: bool | None = None
        """Whether the server called itself serving right after this call ended; asked only of a failed one."""
        self._address = address
        self._request = request
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._first.wait(GUARD_S), "no token came"
        assert self.status is grpc.StatusCode.OK, self.details

    def _run(self) -> None:
        with text_stub(self._address) as stub:
            self.call = stub.Generate(self._request)
            try:
                for response in self.call:
                    for delta in response.deltas:
                        self.text += delta.text
                        self.finish_reason = delta.finish_reason or self.finish_reason
                    self._first.set()
            except grpc.RpcError as error:
                self.status, self.details = error.code(), error.details() or ""
            self.ended_at = time.monotonic()
            if self.status is not grpc.StatusCode.OK:
                self.health_after = serving(self._address)
        self._first.set()

    def join(self) -> OpenCall:
        """Wait for the end."""
        self._thread.join(GUARD_S)
        assert not self._thread.is_alive(), "the call never ended"
        return self
