"""The step log of a real worker process on the fake device, as `greenlane trace` reads it: one format on both sides."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from engine_core.config import WorkerConfig
from engine_core.errors import ConfigError
from engine_core.executor.processes import worker_command
from engine_core.executor.zmq import ZmqExecutor
from engine_core.step import PrefillChunk, StepPlan, StepResult
from frontend.trace import read
from frontend.trace.read import read_runs
from frontend.trace.summary import summarize
from tests.device.rig import plan, row
from tests.worker_config import worker_config

pytestmark = pytest.mark.e2e
MODEL = Path(__file__).parents[1] / "fixtures" / "tiny-qwen3-austen"
GUARD_S = 60.0


def config(step_log: Path) -> WorkerConfig:
    return worker_config(
        kv_cache_memory=1 << 24,
        decode_overlap="green",
        decode_sms=64,
        gpu_wait_timeout=GUARD_S,
        step_log=str(step_log),
    )


class Rig:
    """The core's side of one worker after the other, in a private folder."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o700)
        self.log = folder / "steps.jsonl"
        self._socket = folder / "worker.sock"
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.executor: ZmqExecutor | None = None

    def start(self) -> ZmqExecutor:
        self.executor = ZmqExecutor(
            self._socket,
            command=worker_command(0, "info"),
            wake_fd=self._wake_fd,
            gpu_wait_timeout=GUARD_S,
            worker_timeout=GUARD_S,
            start_timeout=GUARD_S,
        )
        self.executor.start(config(self.log), lambda loading: None)
        return self.executor

    def close(self) -> None:
        if self.executor is not None:
            self.executor.kill()
        os.close(self._wake_fd)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def answer(executor: ZmqExecutor, step: StepPlan) -> StepResult:
    executor.submit(step)
    guard = time.monotonic() + GUARD_S
    while time.monotonic() < guard:
        executor.wait(1.0)
        for result in executor.collect():
            return result
    raise AssertionError("no result came")


def serve(executor: ZmqExecutor) -> None:
    """A prompt alone, another beside decode, and decode until both draw."""
    ids = list(range(1, 25))
    answer(executor, plan(1, starts=[row(0, [1, 2], [0, 1, 2])], chunks=[PrefillChunk(0, 0, 2, True)]))
    start, chunk = row(1, ids, [4, 5, 6, 7, 8, 9, 10]), PrefillChunk(1, 0, 24, True)
    results = [answer(executor, plan(2, starts=[start], decode=[0], chunks=[chunk], lane=True))]
    while not any(result.prefills for result in results):
        results.append(answer(executor, plan(len(results) + 2, decode=[0])))
    answer(executor, plan(len(results) + 2, decode=[0, 1]))


def test_a_worker_s_log_is_what_trace_reads(rig: Rig) -> None:
    """Red when a field of the log is renamed on one side, a line is missing at the worker's ordinary end, a second
    worker overwrites the first one's log, or a line has more to say than it should."""
    for _ in range(2):
        executor = rig.start()
        serve(executor)
        executor.close()
    first, run = read_runs(rig.log)
    assert (first.unreadable, run.unreadable, run.dropped, len(run.failures)) == (0, 0, 0, 0)
    head = run.header
    assert (head.model, head.device, head.overlap, head.clock) == ("tiny-qwen3-austen", "fake", "green", "host")
    assert (head.decode_sms, head.prefill_sms) == (64, 68)
    steps = [(step.step, step.decode_rows, step.chunk_tokens) for step in run.decodes]
    assert steps[:2] == [(1, 0, 2), (2, 1, 0)]
    assert steps[-1] == (len(steps), 2, 0)
    assert [(plan.step, plan.decode_rows) for plan in run.launches] == [(step, rows) for step, rows, _ in steps]
    launched = [(batch.step, batch.rows, batch.chunk_tokens, batch.decode_sms) for batch in run.prefill_launches]
    assert launched == [(2, 1, 24, 64)]
    assert run.split() == "64 SMs decode + 68 prefill"
    assert [(batch.step, batch.rows, batch.chunk_tokens) for batch in run.prefills] == [(2, 1, 24)]
    assert [join.prefill for join in run.joins] == [2]
    assert run.idles
    assert summarize(run).steps == len(steps)
    for line in map(json.loads, rig.log.read_text().splitlines()):
        assert line.keys() == fields(line["event"]), line


def fields(event: str) -> set[str]:
    """What a line of this kind holds, as the reader knows it."""
    kinds: dict[object, Any] = {kind.__struct_config__.tag: kind for kind in get_args(read.Event)}
    return {"event", *kinds[event].__struct_fields__}


def test_a_log_that_can_t_be_written_refuses_to_start(rig: Rig) -> None:
    """Red when the worker serves without the log that was asked for, or the refusal isn't a matter of settings."""
    rig.log.mkdir()
    with pytest.raises(ConfigError, match="can't be written: Is a directory"):
        rig.start()


def test_a_killed_worker_leaves_a_log_that_can_be_read(rig: Rig) -> None:
    """Red when lines reach the file only at the worker's ordinary end."""
    executor = rig.start()
    serve(executor)
    guard = time.monotonic() + GUARD_S
    while b'"join"' not in rig.log.read_bytes():
        assert time.monotonic() < guard
        time.sleep(0.05)
    executor.kill()
    assert [join.prefill for join in read_runs(rig.log)[0].joins] == [2]
