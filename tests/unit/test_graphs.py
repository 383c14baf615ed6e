"""What a captured graph keeps alive, over a torch.cuda that records calls."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_core.device.cuda import graphs


class Workspace:
    """Stands for buffers that a graph names by their address."""

    def __init__(self) -> None:
        self.uses = 0


class Graph:
    def __init__(self) -> None:
        self.replays = 0


def replay(graph: Graph) -> None:
    graph.replays += 1


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> graphs.GraphPool:
    fake = SimpleNamespace(
        graph_pool_handle=lambda: 1,
        stream=nullcontext,
        CUDAGraph=Graph,
        graph=lambda graph, **options: nullcontext(),
    )
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
