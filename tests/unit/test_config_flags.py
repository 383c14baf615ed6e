"""Flags of the engine core: parsed by values, refused by name, and quick."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from engine_core.cli import FLAGS, main, make_crash_dir, parser, read_config, size
from engine_core.config import EngineConfig
from engine_core.errors import ConfigError
from engine_core.model_files import CONFIG_FILES, find_model
from engine_core.progress import Progress

MODEL = Path(__file__).parents[1] / "fixtures" / "tiny-qwen3-austen"
ENGINE = [sys.executable, "-P", "-m", "engine_core", "engine", f"--model={MODEL}"]


def config_of(*flags: str) -> EngineConfig:
    return read_config(parser().parse_args([f"--model={MODEL}", *flags]))


def refusal_of(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What `--check-flags` says on stderr; nothing goes to stdout, and the status is 2."""
    try:
        status = main(["engine", "--check-flags", *flags])
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else -1
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    return err


def test_every_setting_has_exactly_one_flag() -> None:
    """Red when a field is added to EngineConfig and can't be set, or a flag sets nothing."""
    assert sorted(flag.field for flag in FLAGS) == sorted(EngineConfig.__struct_fields__)


def test_without_flags_the_defaults_are_the_configs() -> None:
    """Red when the command line carries defaults of its own."""
    assert config_of() == EngineConfig(model=str(MODEL))


def test_flags_are_read_by_values() -> None:
    """Red when an alias, a size or a switch is read wrongly."""
    config = config_of(
        *("--device=fake", "--block-size", "32", "--kv-cache-memory=1.5GiB", "--no-enable-prefix-caching"),
        *("--gpu-wait-timeout", "2.5", "--address", "unix:/tmp/x", "-tp", "1", "--max-model-len=64"),
    )
    assert config == EngineConfig(
        model=str(MODEL),
        device="fake",
        page_size=32,
        kv_cache_memory=3 << 29,
        enable_prefix_caching=False,
        gpu_wait_timeout=2.5,
        address="unix:/tmp/x",
        max_model_len=64,
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [("1073741824", 1 << 30), ("1GiB", 1 << 30), ("512MiB", 1 << 29), ("2 KiB", 2048), ("4GB", 4 * 10**9), ("7B", 7)],
)
def test_sizes(text: str, value: int) -> None:
    """Red when a unit is off by a factor."""
    assert size(text) == value


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ((), "--model"),
        ((f"--model={MODEL}", "--kv-cache-memory=4 Gigs"), "'4 Gigs' is no size"),
        ((f"--model={MODEL}", "--async-depth=4"), "--async-depth is 4; it must be from 1 to 3"),
        ((f"--model={MODEL}", "--async-depth=two"), "invalid int value: 'two'"),
        ((f"--model={MODEL}", "--max-num-seq=4"), "unrecognized arguments"),
        ((f"--model={MODEL}", "--device=tpu"), "--device is 'tpu'; it must be one of cpu, cuda, fake"),
        ((f"--model={MODEL}", "--address=0.0.0.0:7000"), "--address 0.0.0.0 is not loopback"),
        ((f"--model={MODEL}", "--address=127.0.0.1:70000"), "it must be unix:/path or host:port"),
        ((f"--model={MODEL}", "--address=unix:relative"), "a socket is written unix:/path"),
        ((f"--model={MODEL}", "--address=unix:/tmp/x", "--api-key-file=/k"), "go with --address host:port"),
        ((f"--model={MODEL}", "--api-key-file=/nowhere/k"), "--api-key-file /nowhere/k can't be read"),
        ((f"--model={MODEL}", "--ssl-certfile=/nowhere/c"), "--ssl-certfile needs --ssl-keyfile too"),
        ((f"--model={MODEL}", "--worker-address=tcp://1.2.3.4:5"), "it must be unix:/path"),
        ((f"--model={MODEL}", "--log-level=loud"), "--log-level is 'loud'"),
        ((f"--model={MODEL}", "--max-model-len=4096"), "beyond the model's context of 2048 tokens"),
        ((f"--model={MODEL}", f"--crash-dir={MODEL / 'config.json'}"), "is no folder"),
        ((f"--model={MODEL}", "--crash-dir=/proc/reports"), "can't be made: "),
        ((f"--model={MODEL}", "--gpu-wait-timeout=nan"), "--gpu-wait-timeout is nan"),
        (("--model=/nowhere/at/all",), "no such folder"),
        (("--model=../escape",), "no such folder, and no repository id"),
    ],
)
def test_bad_flags_are_refused_by_name(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], text: str) -> None:
    """Red when a bad setting is accepted, or its message doesn't say which it is and what would work."""
    message = refusal_of(capsys, *flags)
    assert message.startswith("error: ")
    assert text in message


def test_a_broken_model_folder_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Red when --check-flags doesn't look at config.json."""
    assert "config.json is missing" in refusal_of(capsys, f"--model={tmp_path}")
    shutil.copytree(MODEL, tmp_path / "m")
    data = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(data | {"architectures": ["GPT2LMHeadModel"]}))
    assert "architecture 'GPT2LMHeadModel' is not served" in refusal_of(capsys, f"--model={tmp_path / 'm'}")


def test_good_flags_pass_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    """Red when a check prints or starts something."""
    assert main(["engine", "--check-flags", f"--model={MODEL}"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", [[], ["serve"], ["--help"]])
def test_other_commands_show_the_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """Red when a wrong command ends in silence or with status 0."""
    assert main(arguments) == (0 if arguments == ["--help"] else 2)
    assert "engine_core {engine,worker}" in capsys.readouterr().err


def test_help_and_checks_import_no_heavy_library() -> None:
    """Red when `--help` or `--check-flags` waits for torch, grpc or zmq."""
    code = (
        "import sys\nfrom engine_core.cli import main\n"
        f"assert main(['engine', '--check-flags', '--model={MODEL}']) == 0\n"
        "try:\n    main(['engine', '--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "print([name for name in ('torch', 'grpc', 'zmq', 'uvloop', 'huggingface_hub') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_a_ready_descriptor_without_a_reader_is_refused() -> None:
    """Red when a core whose supervisor has died between spawn and start serves on as an orphan."""
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    result = subprocess.run(
        [*ENGINE, f"--ready-fd={write_fd}"], pass_fds=(write_fd,), capture_output=True, text=True, timeout=60
    )
    os.close(write_fd)
    assert (result.returncode, result.stderr) == (2, f"error: --ready-fd {write_fd} has no reader any more\n")


def test_a_parent_that_is_gone_ends_the_child() -> None:
    """Red when a child that lost its parent before it could ask to die with it lives on."""
    result = subprocess.run([*ENGINE, "--parent-pid=0"], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (1, "")


def test_a_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a relative folder reaches the worker, which may run elsewhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert find_model("owner/name", CONFIG_FILES) == tmp_path / "owner" / "name"


def test_a_repository_that_cannot_be_had_is_a_config_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Red when a missing network or repository ends in a traceback."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked: list[tuple[str, list[str]]] = []

    def download(repository: str, *, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        if repository == "owner/there":
            return str(tmp_path)
        raise LocalEntryNotFoundError("no network\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert find_model("owner/there", CONFIG_FILES) == tmp_path
    assert asked == [("owner/there", list(CONFIG_FILES))]
    with pytest.raises(ConfigError, match=r"the model hub can't be reached: name a folder$"):
        find_model("owner/gone", CONFIG_FILES)


def test_settings_that_cross_the_wire_survive_it() -> None:
    """Red when a field of the worker's configuration can't be encoded."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config_of()), type=EngineConfig) == config_of()


# ------------------------------ progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_in_a_log_says_each_tenth_once() -> None:
    """Red when a load of a thousand tensors writes a thousand lines, or nobody says what a stage of it took."""
    out = io.StringIO()
    now = [7.0]
    progress = Progress(out, lambda: now[0])
    progress.show("kernels", 0, 1)
    now[0] += 1.0
    for done in range(1001):
        progress.show("weights", done, 1000)
        now[0] += 0.0021
    progress.finish()
    lines = out.getvalue().splitlines()
    shown = [f"weights {percent:3d} %" for percent in range(0, 100, 10)]
    assert lines == ["kernels   0 %", *shown, "weights 100 %, 2.1 s"]


def test_progress_on_a_terminal_rewrites_its_line() -> None:
    """Red when a terminal fills with lines, or the next log line continues the progress line."""
    out = Terminal()
    progress = Progress(out)
    progress.show("weights", 1, 2)
    progress.show("weights", 1, 2)
    progress.show("warm-up", 0, 0)
    progress.finish()
    assert out.getvalue() == "\rweights  50 %\n\rwarm-up\n"


def test_a_crash_folder_of_others_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Red if reports turn out not to be writable when there is one to write. (Root may write everywhere.)"""
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"^--crash-dir .* can't be written to by this user$"):
        make_crash_dir(tmp_path)
