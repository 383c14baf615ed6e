"""What of start-up progress reaches the engine core."""

from __future__ import annotations

from engine_core.errors import ProtocolViolation
from engine_core.executor.channel import Loading
from engine_core.executor.frames import QUEUED_FRAMES
from engine_core.worker.loading import LoadingReports


def test_progress_never_fills_the_queue_of_frames() -> None:
    """Red when every tensor is a frame: a core that reads late would end the worker at its start. The first and the
    last of each stage are there, so that a stage that ends at once is seen."""
    clock, sent = [0.0], list[Loading]()
    reports = LoadingReports(sent.append, lambda: clock[0])
    for what in ("load weights", "capture graphs"):
        for done in range(2001):
            clock[0] += 0.0005
            reports(what, done, 2000)
    assert len(sent) < QUEUED_FRAMES // 2
    for what in ("load weights", "capture graphs"):
        of_stage = [(report.done, report.total) for report in sent if report.what == what]
        assert (of_stage[0], of_stage[-1]) == ((0, 2000), (2000, 2000))


def test_slow_progress_is_told_as_it_comes() -> None:
    """Red when a long stage goes silent: the core takes silence for a stuck worker."""
    clock, sent = [0.0], list[Loading]()
    reports = LoadingReports(sent.append, lambda: clock[0])
    for done in range(5):
        clock[0] += 1.0
        reports("read", done, 0)
    assert [report.done for report in sent] == [0, 1, 2, 3, 4]


def test_a_report_that_finds_no_room_ends_nothing() -> None:
    """Red when a core that is stopped while a worker loads ends that worker for the sake of its progress."""

    def full(_: Loading) -> None:
        raise ProtocolViolation("the peer doesn't read")

    LoadingReports(full, lambda: 0.0)("load weights", 0, 10)
