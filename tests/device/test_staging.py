"""Staged inputs over a simulated stream: every replay reads what was filled for it, whenever the stream gets there.

Rules S1, S2, S6 and S8. The stream runs what was enqueued only when it is told to, or when somebody waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_core.device.cuda.staging import NO_SLOT, RING, Staging
from engine_core.device.driver import Driver, ImmediateDriver, Status
from engine_core.device.fail_stop import Unbounded
from engine_core.device.lanes import LaneStream

ROWS, TOKENS = 4, 8


class Stream(ImmediateDriver):
    """One stream's work, in order, not yet run; and the table of calls that wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: deque[Callable[[], None]] = deque()
        self._recorded: dict[Any, int] = {}
        """How often each event was recorded and not yet reached."""

    def enqueue(self, work: Callable[[], None]) -> None:
        self._pending.append(work)

    def run(self, count: int) -> None:
        for _ in range(min(count, len(self._pending))):
            self._pending.popleft()()

    def event_record(self, event: Any, stream: Any) -> tuple[int]:
        self._recorded[event] = self._recorded.get(event, 0) + 1

        def reach() -> None:
            self._recorded[event] -= 1

        self.enqueue(reach)
        return (Status.SUCCESS,)

    def event_query(self, event: Any) -> tuple[int]:
        return (Status.NOT_READY if self._recorded.get(event) else Status.SUCCESS,)

    def event_synchronize(self, event: Any) -> tuple[int]:
        while self._recorded.get(event):
            self.run(1)
        return (Status.SUCCESS,)

    def stream_synchronize(self, stream: Any) -> tuple[int]:
        self.run(len(self._pending))
        return (Status.SUCCESS,)


class SimulatedStaging(Staging):
    """Copies run when the stream gets to them, from whatever the buffer holds by then."""

    def __init__(self, stream: Stream, **options: Any) -> None:
        self.stream = stream
        super().__init__(Driver(stream, Unbounded()), LaneStream(1), ROWS, TOKENS, torch.device("cpu"), **options)

    def _copy(self, slot: int, *, tokens: bool) -> None:
        self.stream.enqueue(lambda: Staging._copy(self, slot, tokens=tokens))


class Player:
    """Fills, replays and notes what each replay read."""

    def __init__(self, **options: Any) -> None:
        self.stream = Stream()
        self.staging = SimulatedStaging(self.stream, **options)
        self.filled: list[int] = []
        self.read: list[tuple[int, int]] = []
        self._in_graph = bool(options.get("in_graph"))

    def step(self) -> None:
        value = 1000 + len(self.filled)
        fields = self.staging.begin()
        fields["positions"][:] = value
        fields["ids"][:] = value
        self.filled.append(value)
        self.staging.replay(self._graph, tokens=True)

    def _graph(self) -> None:
        self.staging.copy_in_graph(tokens=True)
        self.stream.enqueue(self._forward)

    def _forward(self) -> None:
        fields = self.staging.on_device
        self.read.append((int(fields["positions"][-1]), int(fields["ids"][-1])))

    def finish(self) -> None:
        self.stream.stream_synchronize(None)
        assert self.read == [(value, value) for value in self.filled]


SCHEDULES = st.lists(st.integers(0, 5), min_size=1, max_size=30)
"""How far the stream gets after each step."""


@given(SCHEDULES)
def test_s1_every_replay_reads_its_own_inputs(schedule: list[int]) -> None:
    """Red when a buffer is filled again before its copy, or the event is recorded ahead of the copy."""
    player = Player()
    for progress in schedule:
        player.step()
        player.stream.run(progress)
    player.finish()


@given(SCHEDULES, st.sampled_from([{"ring": 1}, {"in_graph": True}]))
def test_s8_a_ring_of_one_and_captured_copies_read_the_same(schedule: list[int], options: dict[str, Any]) -> None:
    """Red without the drain before a refresh: the copy in the graph would read the next step's inputs."""
    player = Player(**options)
    for progress in schedule:
        player.step()
        player.stream.run(progress)
    player.finish()


def test_s1_a_refresh_waits_for_its_own_copy_alone() -> None:
    """Red when a refresh drains the stream: the host could never be ahead of it."""
    player = Player()
    for _ in range(RING):
        player.step()
    assert (player.staging.waits, player.read) == (0, [])
    player.step()
    assert player.staging.waits == 1, "the first buffer was filled again while its copy was still to come"
    assert len(player.read) == 0, "more than the first copy was waited for"
    player.finish()


def test_s2_a_ring_of_two_binds_with_three_steps_in_flight() -> None:
    """Red with a ring of four, in which no wait could ever be missed (rule S2)."""
    player = Player()
    for _ in range(3):
        player.step()
    assert player.staging.waits == 1


def test_s8_counters_tell_a_drain_from_none() -> None:
    """Red when `on` drains or `off` doesn't: the two could not be told apart in a measurement."""
    on, off = Player(), Player(in_graph=True)
    for player in (on, off):
        for _ in range(5):
            player.step()
        player.finish()
    assert (on.staging.drains, off.staging.drains, off.staging.waits) == (0, 5, 0)


@pytest.mark.parametrize("options", [{}, {"in_graph": True}])
def test_s6_padding_has_no_slot_from_the_start(options: dict[str, Any]) -> None:
    """Red when fields begin as zeros: a captured or measured step would write into slot 0's pages."""
    staging = Player(**options).staging
    for name in NO_SLOT:
        assert bool((staging.on_device[name] == -1).all())
        assert bool((staging.begin()[name] == -1).all())


def test_a_row_copy_leaves_the_tokens_alone() -> None:
    """Red when a decode step copies the fields of chunks too, which are most of the bytes."""
    player = Player()
    fields = player.staging.begin()
    fields["positions"][:], fields["ids"][:] = 7, 7
    player.staging.send(tokens=False)
    player.stream.stream_synchronize(None)
    on_device = player.staging.on_device
    assert (int(on_device["positions"][0]), int(on_device["ids"][0])) == (7, 0)
