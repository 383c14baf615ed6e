"""Private folders of sockets: closed to others, gone with their owner, even one that was killed."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from access.folders import LOCK, private_folder, remove_abandoned

HOLD = """
import sys
from access.folders import private_folder
with private_folder() as folder:
    (folder / "engine.sock").write_text("")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_private_folders_are_closed_to_others_and_go_away(parent: Path) -> None:
    """Red when local sockets lie where other users may connect, or folders are left behind."""
    with private_folder() as folder:
        assert folder.parent == parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "file").write_text("x")
    assert list(parent.iterdir()) == []


def test_a_killed_owners_folder_goes_with_the_next_start_and_a_living_ones_stays(parent: Path) -> None:
    """Red when killed servers fill the folder of temporary files, or a start takes a running server's sockets away."""
    owners = [
        subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders: list[Path] = []
    for owner in owners:
        assert owner.stdout is not None
        folders.append(Path(owner.stdout.readline().strip()))
    owners[0].send_signal(signal.SIGKILL)
    owners[0].wait()
    assert all(folder.exists() for folder in folders)
    with private_folder() as own:
        assert sorted(parent.iterdir()) == sorted([folders[1], own])
    assert (folders[1] / "engine.sock").exists()
    owners[1].communicate()
    assert list(parent.iterdir()) == []
    for owner in owners:
        for pipe in (owner.stdin, owner.stdout):
            assert pipe is not None
            pipe.close()


def test_the_folder_of_a_process_that_was_killed_meanwhile_goes_too(parent: Path) -> None:
    """Red when `serve` ends and the folder of an engine core that it had to kill stays until somebody starts again."""
    with private_folder():
        owner = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        owner.kill()
        owner.communicate()
        assert folder.exists()
    assert list(parent.iterdir()) == []


def test_what_is_not_known_to_be_abandoned_stays(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Red when a folder is removed that has no lock, is open to others, or is a link to somewhere else."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / LOCK).write_text("")
    elsewhere.chmod(0o700)
    for name, mode, locked in (("none", 0o700, False), ("open", 0o755, True), ("dead", 0o700, True)):
        folder = parent / f"greenlane-{name}"
        folder.mkdir()
        folder.chmod(mode)
        if locked:
            (folder / LOCK).write_text("")
    (parent / "greenlane-link").symlink_to(elsewhere)
    (parent / "other").mkdir(mode=0o700)
    (parent / "other" / LOCK).write_text("")
    assert remove_abandoned(parent) == [parent / "greenlane-dead"]
    assert elsewhere.exists()
    assert {path.name for path in parent.iterdir()} == {"greenlane-none", "greenlane-open", "greenlane-link", "other"}
