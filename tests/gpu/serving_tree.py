"""A serving tree with one fault to come, its clients, and what its log says about when things happened."""

from __future__ import annotations

import json
import re
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from greenlane.text.v1 import text_pb2

from scripts import serving
from scripts.bench import make_shape
from tests.e2e.harness import text_stub

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "0.6b"
GUARD_S = 120.0
FLAGS = (
    "--decode-overlap=green",
    "--load-format=dummy",
    "--kv-cache-memory=8GiB",
    "--max-num-seqs=32",
    "--max-num-batched-tokens=2048",
    "--max-model-len=16384",
)
LONG_PROMPT = 1500
FAULT_TOKENS = 1024
"""Prefills as long as this are the ones that the fault strikes."""


class Tree:
    """`greenlane serve` on a shape of random weights; `log` is what all its processes said."""

    def __init__(self, work: Path, patch: pytest.MonkeyPatch, device: str, fault: dict[str, Any], *flags: str) -> None:
        script, self.log = work / "fault.json", work / "serve.log"
        script.write_text(json.dumps({"tokens": FAULT_TOKENS, **fault}))
        command = [serving.GREENLANE[0], "-P", "-m", "tests.gpu.faulty_tree", str(script)]
        patch.setattr(serving, "GREENLANE", command)
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'proto'}", prepend=":")
        model = make_shape.write(SHAPE, work / "model")
        self.serving = serving.start(model, self.log, [f"--device={device}", *FLAGS, *flags])

    def stop(self) -> None:
        serving.stop(self.serving.process)

    def worker(self) -> int:
        """The pid of the living worker."""
        (pid,) = [pid for pid, role in self.serving.roles().items() if role.startswith("worker")]
        return pid

    def serves(self) -> bool:
        """Whether a request is answered in full."""
        body = {"model": self.serving.ready["info"]["model"], "prompt": [11] * 8, "max_tokens": 4, "ignore_eos": True}
        try:
            with httpx.Client(base_url=self.serving.http, timeout=GUARD_S, trust_env=False) as http:
                answer = http.post("/v1/completions", json=body)
        except httpx.TransportError:
            return False
        return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4

    def logged(self, name: str) -> dict[str, Any]:
        """The first log record of that event."""
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith("{") and f'"event": "{name}"' in line:
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError(f"nobody logged {name}:\n{self.log.read_text(errors='replace')}")

    def logged_at(self, name: str) -> float:
        """When (seconds since the epoch, to the millisecond) the event was logged for the first time."""
        return datetime.fromisoformat(self.logged(name)["time"]).timestamp()

    def said(self, pattern: str) -> bool:
        return re.search(pattern, self.log.read_text(errors="replace")) is not None


class Stream(threading.Thread):
    """One streamed request, watched to its end."""

    def __init__(self, tree: Tree, prompt: int, tokens: int) -> None:
        super().__init__(daemon=True)
        self._address = tree.serving.grpc
        self._request = text_pb2.GenerateRequest(
            prompt_ids=text_pb2.TokenIds(ids=[11 + number for number in range(prompt)]),
            sampling=text_pb2.Sampling(max_tokens=tokens, ignore_eos=True, temperature=0.0),
        )
        self.begun = threading.Event()
        self.status = grpc.StatusCode.OK
        self.details = ""
        self.ended_at = 0.0
        """Seconds since the epoch."""
        self.start()

    def run(self) -> None:
        with text_stub(self._address) as stub:
            try:
                for response in stub.Generate(self._request, timeout=GUARD_S):
                    if response.deltas:
                        self.begun.set()
            except grpc.RpcError as error:
                self.status, self.details = error.code(), error.details() or ""
            self.ended_at = time.time()

    def decoding(self) -> Stream:
        """Wait for its first token."""
        assert self.begun.wait(GUARD_S), f"no token came: {self.status} {self.details}"
        return self

    def ended(self) -> Stream:
        self.join(GUARD_S)
        assert not self.is_alive(), "the request never ended"
        return self
