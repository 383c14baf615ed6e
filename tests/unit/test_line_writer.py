"""Lines on their way to a file: whole and in order, bounded where the file is slow, ended where it is full."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from engine_core.cli import main
from engine_core.errors import ConfigError
from engine_core.worker.line_writer import BUFFER_BYTES, LineWriter, open_lines
from tests.unit.memory_file import Full, Memory

MODEL = Path(__file__).parents[1] / "fixtures" / "tiny-qwen3-austen"
GUARD_S = 60.0


def dropped(count: int) -> bytes:
    return b"dropped %d\n" % count


def test_lines_arrive_whole_and_in_order() -> None:
    """Red when a line is lost between the buffer and the file, or a file that takes pieces gets a part."""
    file = Memory(piece=7)
    writer = LineWriter(file, dropped, interval_s=0.0)
    for number in range(5000):
        writer.append(b"line %d\n" % number)
    writer.close()
    assert file.data == b"".join(b"line %d\n" % number for number in range(5000))
    assert file.closed


def test_a_full_disk_ends_the_log_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Red when a full disk raises into the step, warns at every line, or keeps lines in memory."""
    file = Full()
    with caplog.at_level(logging.WARNING, "greenlane.worker"):
        writer = LineWriter(file, dropped, interval_s=0.0)
        writer.append(b"one\n")
        writer._thread.join(GUARD_S)
        for _ in range(100):
            writer.append(b"more\n")
        writer.close()
    assert [(record.getMessage(), "No space left" in str(record.__dict__["fields"])) for record in caplog.records] == [
        ("step_log_ends", True)
    ]
    assert file.closed
    assert writer._lines == []


class Slow(Memory):
    """Takes nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def write(self, data: bytes, /) -> int:
        self.entered.set()
        assert self.go.wait(GUARD_S)
        return super().write(data)


def test_a_slow_disk_costs_lines_and_no_time() -> None:
    """Red when a line waits for the file (this test would hang), the buffer has no bound, or lost lines aren't told."""
    file = Slow()
    writer = LineWriter(file, dropped, interval_s=0.0)
    writer.append(b"first\n")
    assert file.entered.wait(GUARD_S)
    line = b"x" * (BUFFER_BYTES // 8 - 1) + b"\n"
    for _ in range(11):
        writer.append(line)
    file.go.set()
    writer.close()
    assert file.data == b"first\n" + 8 * line + b"dropped 3\n"


def test_a_log_goes_on_at_the_start_of_a_line(tmp_path: Path) -> None:
    """Red when a restarted worker's header is glued to a line that its predecessor didn't finish."""
    path = tmp_path / "steps.jsonl"
    for text in (b"one\ntw", b"three\n", b"four\n"):
        file = open_lines(path)
        file.write(text)
        file.close()
    assert path.read_bytes() == b"one\ntw\nthree\nfour\n"


def test_paths_that_can_t_be_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when a wrong --step-log is found only after the model was loaded, or isn't named."""
    check = ["engine", "--check-flags", f"--model={MODEL}"]
    assert main([*check, f"--step-log={tmp_path / 'no' / 'steps.jsonl'}"]) == 2
    assert f"{tmp_path / 'no'} is no folder" in capsys.readouterr().err
    assert main([*check, f"--step-log={tmp_path}"]) == 2
    assert "is a folder; name a file in it" in capsys.readouterr().err
    assert main([*check, f"--step-log={tmp_path / 'steps.jsonl'}"]) == 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="can't be written: Is a directory"):
        open_lines(tmp_path)
