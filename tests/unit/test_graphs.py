"""What a captured graph keeps alive, over a torch.cuda that records calls; what follows from one that can't be."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_core.device.cuda import graphs
from engine_core.device.cuda.graphs import Forward
from engine_core.errors import ConfigError


class Workspace:
    """Stands for buffers that a graph names by their address."""

    def __init__(self) -> None:
        self.uses = 0


class Graph:
    def __init__(self) -> None:
        self.replays = 0
        self.capturing: list[bool] = []
        GRAPHS.append(self)

    def capture_begin(self, *, pool: int, capture_error_mode: str) -> None:
        self.capturing.append(True)

    def capture_end(self) -> None:
        self.capturing.append(False)


GRAPHS: list[Graph] = []


def replay(graph: Graph) -> None:
    graph.replays += 1


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> graphs.GraphPool:
    fake = SimpleNamespace(
        graph_pool_handle=lambda: 1,
        stream=nullcontext,
        CUDAGraph=Graph,
    )
    GRAPHS.clear()
    monkeypatch.setattr(graphs, "_cuda", fake)
    monkeypatch.setattr(torch._C, "_CUDAGraph", SimpleNamespace(replay=replay), raising=False)
    return graphs.GraphPool()


def test_a_graph_keeps_the_buffers_of_its_work(pool: graphs.GraphPool) -> None:
    """Red when the replay holds the graph alone: attention's workspaces went back to the allocator, and whatever was
    allocated there later was overwritten by the next step (rule S3)."""
    stream: Any = SimpleNamespace(synchronize=lambda: None)
    workspace = Workspace()
    alive = weakref.ref(workspace)

    def work(workspace: Workspace = workspace) -> None:
        workspace.uses += 1

    captured = pool.capture(stream, work)
    del work, workspace
    gc.collect()
    kept = alive()
    assert kept is not None
    assert kept.uses == 2, "once eagerly, once to be captured"
    captured()
    assert kept.uses == 2, "a replay runs no Python"
    del captured, kept
    gc.collect()
    assert alive() is None


def test_a_rehearsal_stands_for_the_eager_run(pool: graphs.GraphPool) -> None:
    """Red when the work itself runs eagerly, all layers of it, or when the rehearsal is what is captured."""
    stream: Any = SimpleNamespace(synchronize=lambda: None)
    ran: list[int] = []
    forward = Forward(ran.append, 36)
    pool.capture(stream, forward, forward.rehearse)
    assert ran == [1, 36]


def test_s3_a_work_that_fails_leaves_no_stream_in_capture(pool: graphs.GraphPool) -> None:
    """Red when an error of the work skips the end of the capture: everything later on that stream would fail too."""
    stream: Any = SimpleNamespace(synchronize=lambda: None)

    def fail() -> None:
        if GRAPHS[-1].capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        pool.capture(stream, fail)
    assert GRAPHS[-1].capturing == [True, False]


class ScriptedPool:
    """Captures until it is told to fail; a capture takes `seconds`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds = 0.1
        self.error: Exception | None = None
        self.captured: list[object] = []

    def capture(self, stream: Any, work: Callable[[], None], rehearse: Callable[[], None] | None) -> Callable[[], None]:
        self.now += self.seconds
        if self.error is not None:
            raise self.error
        self.captured.append(work)
        return lambda: None


def work() -> None:
    """Some forward."""


def test_s3_a_failed_capture_leaves_eager_work_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Red when the error ends the start, or the next size is tried again: a capture error ends the capture."""
    pool = ScriptedPool()
    captures = graphs.Captures(lambda: pool.now)
    assert captures.take(pool, None, work, "256 decode rows", bound=False) is not work
    pool.error = RuntimeError("operation not permitted when stream is capturing")
    with caplog.at_level("WARNING"):
        assert captures.take(pool, None, work, "192 decode rows", bound=False) is work
    assert "capture_ended" in caplog.text
    pool.error = None
    assert captures.take(pool, None, work, "128 decode rows", bound=False) is work
    assert len(pool.captured) == 1
    assert len(caplog.records) == 1, "said once"


def test_s3_green_refuses_to_start_without_its_graphs() -> None:
    """Red when decode on a partition would run eagerly, on all SMs (rule L2)."""
    pool = ScriptedPool()
    pool.error = RuntimeError("out of memory")
    with pytest.raises(ConfigError, match=r"64 decode rows can't be captured.*out of memory.*use off"):
        graphs.Captures(lambda: pool.now).take(pool, None, work, "64 decode rows", bound=True)


def test_s3_captures_keep_to_their_time() -> None:
    """Red without the budget: a machine that captures slowly would be starting for ever."""
    pool = ScriptedPool()
    pool.seconds = graphs.BUDGET_S / 2.5
    captures = graphs.Captures(lambda: pool.now)
    taken = [captures.take(pool, None, work, "decode", bound=False) is not work for _ in range(5)]
    assert taken == [True, True, True, False, False]


def test_s3_an_error_that_is_no_capture_error_is_not_hidden() -> None:
    """Red when a bug in the forward itself is taken for a capture that failed."""
    pool = ScriptedPool()
    pool.error = ValueError("x is float32")
    with pytest.raises(ValueError, match="float32"):
        graphs.Captures(lambda: pool.now).take(pool, None, work, "1 decode row", bound=False)
