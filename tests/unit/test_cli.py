"""The `greenlane` command without a server: flags, config file, plans, refusals."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine_core.cli import FLAGS as ENGINE_FLAGS
from engine_core.config import EngineConfig
from frontend import serve
from frontend.cli import app
from frontend.cli_flags import FLAGS, To, Value, child_argv, read_config_file
from frontend.config import ConfigError, FrontendConfig
from frontend.serve import check_flags, make_plan
from tests.certificates import Authority, key_file

TINY = Path(__file__).resolve().parents[1] / "fixtures" / "tiny-qwen3-austen"
GUARDS = {"ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "api_key_file", "insecure_listen"}
"""Of the frontends, where both kinds of process have them."""
SET_BY_SERVE = {"address", "worker_address", *GUARDS}
"""Settings of the engine core that `serve` derives from --engine-address or has no use for: it is for this machine."""


def flags_of(to: To) -> dict[str, str | None]:
    return {flag.key: flag.default for flag in FLAGS if to in flag.to}


def test_engine_flags_follow_the_engine() -> None:
    """Red when the engine core gains, loses or renames a setting, or changes a default, and `serve` doesn't."""
    settings = dict(zip(EngineConfig.__struct_fields__[1:], EngineConfig.__struct_defaults__, strict=True))
    known = flags_of(To.ENGINE)
    assert known.keys() == {"model", *settings} - SET_BY_SERVE
    shown = {key: default for key, default in known.items() if default is not None}
    assert shown == {key: str(settings[key]) for key in shown}


def test_frontend_flags_follow_the_frontend() -> None:
    """Red when the frontend gains, loses or renames a setting, or changes a default, and `serve` doesn't."""
    settings = {field.name: field.default for field in dataclasses.fields(FrontendConfig)}
    known = flags_of(To.FRONTEND)
    session = {"engine_tls_ca_certs", "engine_tls_certfile", "engine_tls_keyfile", "engine_api_key_file"}
    assert known.keys() == settings.keys() - {"engine_address"} - session
    shown = {key: default for key, default in known.items() if default is not None}
    assert shown == {key: str(settings[key]) for key in shown}


def test_every_process_accepts_what_serve_hands_it(tmp_path: Path) -> None:
    """Red when a process's parser doesn't know a flag of the table: `serve` could never pass it on."""
    values: dict[str, Value] = {flag.key: flag.default for flag in FLAGS if flag.default is not None}
    values |= {"model": str(TINY), "served_model_name": ["a", "b"], "enable_prefix_caching": False, "threads": "1"}
    values |= {"max_model_len": "512", "kv_cache_memory": "64MiB", "request_timeout": "30", "crash_dir": str(tmp_path)}
    values |= {"step_log": str(tmp_path / "steps.jsonl"), "max_num_batched_tokens": "2048"}
    served = Authority(tmp_path).issue("server")
    values |= {"ssl_keyfile": str(served.key), "ssl_certfile": str(served.cert), "ssl_ca_certs": str(served.ca)}
    values |= {"api_key_file": str(key_file(tmp_path, "one"))}
    values |= {"insecure_listen": True}
    values |= {"vllm_grpc_port": "50052"}
    unset = {flag.key for flag in FLAGS} - values.keys()
    assert unset == {"engine_address", "decode_sms", "itl_target_ms", "ttft_target_ms", "otlp_traces_endpoint"}
    plan = make_plan(values, tmp_path)
    for argv in (plan.engine, *plan.frontends):
        check_flags(argv)


def test_each_process_gets_its_own_flags() -> None:
    values: dict[str, Value] = {"model": "m", "port": "1", "page_size": "32", "enable_prefix_caching": False}
    values["served_model_name"] = ["a", "b"]
    assert child_argv(values, To.ENGINE) == ["--model=m", "--page-size=32", "--no-enable-prefix-caching"]
    assert child_argv(values, To.FRONTEND) == [
        "--model=m",
        "--served-model-name=a",
        "--served-model-name=b",
        "--port=1",
    ]


# ------------------------------ config file


def test_config_file_values_become_flags(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('model = "m"\nmax-model-len = 512\nmax_num_seqs = 8\nserved-model-name = ["a", "b"]\n')
    assert read_config_file(path) == {
        "model": "m",
        "max_model_len": "512",
        "max_num_seqs": "8",
        "served_model_name": ["a", "b"],
    }


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max-modl-len = 512", "'max-modl-len'"),
        ("max-model-len = 512\nmax_model_len = 512", "max-model-len stands there twice"),
        ("enable-prefix-caching = 1", "enable-prefix-caching is a switch"),
        ("no-enable-prefix-caching = true", "write enable-prefix-caching = false"),
        ("no-port = 1", "see `greenlane serve --help`"),
        ("port = true", "port must be text or a number"),
        ("port = [1]", "port must be text or a number"),
        ("[server]\nport = 1", "'server'"),
        ("port =", "can't be read"),
    ],
)
def test_bad_config_files_are_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    """Red if a misspelt key is ignored: the server would run with a default that nobody chose."""
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_config_file(path)


def test_missing_config_file_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "none.toml")])
    assert result.exit_code == 2
    assert "none.toml can't be read" in result.output


# ------------------------------ plans and refusals


def test_plan_shares_one_address(tmp_path: Path) -> None:
    """Red if the core listens elsewhere than where its frontends connect."""
    plan = make_plan({"model": "m", "frontends": "2", "port": "9000"}, tmp_path)
    assert plan.engine_address == f"unix:{tmp_path}/engine.sock"
    assert f"--address=unix:{tmp_path}/engine.sock" in plan.engine
    assert all(f"--engine-address={plan.engine_address}" in argv for argv in plan.frontends)
    assert all("--port=9000" in argv for argv in plan.frontends)
    assert [argv[argv.index(f"--peers={tmp_path}") + 1] for argv in plan.frontends] == ["--place=1", "--place=2"]


def test_plan_with_tcp_engine(tmp_path: Path) -> None:
    plan = make_plan({"model": "m", "engine_address": "127.0.0.1:7000"}, tmp_path)
    assert plan.engine[-2:] == ["--address=127.0.0.1:7000", "--model=m"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "--model is missing"),
        ({"engine_address": "10.0.0.1:7000"}, "--engine-address: 10.0.0.1 is not loopback"),
        ({"engine_address": "example.org:7000"}, "--engine-address: example.org is not loopback"),
        ({"engine_address": "127.0.0.1:0"}, "port must be from 1 to 65535"),
        ({"engine_address": "7000"}, "must be unix:/path or host:port"),
        ({"engine_address": "unix:/a,unix:/b"}, "starts one engine core"),
        ({"frontends": "0"}, "--frontends is 0"),
        ({"frontends": "many"}, "--frontends is 'many'"),
        ({"start_timeout": "soon"}, "--start-timeout is 'soon'"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, values: dict[str, Value], named: str) -> None:
    """Red if an address beyond loopback is accepted, or a refusal doesn't name its flag."""
    with pytest.raises(ConfigError, match=named):
        make_plan({"model": "m", **values} if values else {}, tmp_path)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--model", str(TINY.parent)], "config.json"),
        (["--model", str(TINY), "--host", "0.0.0.0"], "--host 0.0.0.0 is not loopback"),
        (["--model", str(TINY), "--async-depth", "9"], "--async-depth is 9"),
        (["--model", str(TINY), "--device", "tpu"], "--device is 'tpu'"),
        (["--model", str(TINY), "--decode-overlap", "green"], "--decode-overlap green needs --device cuda"),
        (["--model", str(TINY), "--tensor-parallel-size", "2"], "--tensor-parallel-size"),
        (["--model", str(TINY), "--max-num-seqs", "x"], "--max-num-seqs"),
        (["--model", str(TINY), "--port", "70000"], "--port"),
    ],
)
def test_serve_checks_before_it_starts_anything(flags: list[str], named: str) -> None:
    """Red if a bad setting is only found once processes run; the status says that a restart can't help."""
    result = CliRunner().invoke(app, ["serve", *flags])
    assert result.exit_code == 2
    assert named in result.output


def test_a_missing_runtime_folder_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Red if a stale XDG_RUNTIME_DIR, as `sudo -u` leaves it, ends in a traceback instead of the remedy."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "none")}
    for command in ("serve", "engine"):
        program = [sys.executable, "-P", "-c", "from frontend.cli import main; main()", command]
        flags = [f"--model={TINY}", "--device=fake", "--port=0", "--grpc-port=0"]
        flags = flags if command == "serve" else [*flags[:2], "--address=127.0.0.1:0"]
        result = subprocess.run([*program, *flags], capture_output=True, text=True, env=environment, timeout=60)
        assert result.returncode == 2, result.stderr
        assert "XDG_RUNTIME_DIR" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_settings_are_checked_is_a_clean_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    """Red if `serve` that is stopped before it has started anything leaves its folder, or ends by the signal."""

    def signalled(*_: object) -> None:
        assert list(tmp_path.iterdir()) != []
        os.kill(os.getpid(), number)
        time.sleep(60)

    before = signal.getsignal(number)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(serve, "check_flags", signalled)
    assert serve.serve({"model": str(TINY)}, None, None) == 0
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("text", "flags", "where"),
    [
        ('max-num-seqs = "x"', [], ": max-num-seqs)"),
        ("port = 8000.5", [], ": port)"),
        ('async_depth = 9\nport = "x"', ["--port", "70000"], None),
        ("async_depth = 9", [], ": async-depth)"),
        ('start-timeout = "soon"\nport = 0', [], ": start-timeout)"),
    ],
)
def test_a_refused_setting_of_the_file_names_file_and_key(
    tmp_path: Path, text: str, flags: list[str], where: str | None
) -> None:
    """Red if a bad value of the config file is blamed on a flag that nobody gave, or a given flag on the file."""
    path = tmp_path / "serve.toml"
    path.write_text(text)
    result = CliRunner().invoke(app, ["serve", "--model", str(TINY), "--config", str(path), *flags])
    assert result.exit_code == 2
    if where is not None:
        assert f"(--config {path}{where}" in result.output
    assert "port)" not in result.output or not flags


def test_help_needs_nothing_heavy() -> None:
    """Red if `greenlane --help` imports torch, grpc, tokenizers or numpy."""
    code = (
        "import sys\nfrom frontend.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(','.join({'torch', 'grpc', 'tokenizers', 'numpy'} & sys.modules.keys()) or 0)"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "complete" in result.stdout


def test_serve_help_shows_every_flag() -> None:
    """Red if a flag of the table is missing from the help that a person reads, or cut in a terminal of 80 columns."""
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "…" not in result.output
    missing = [flag.name for flag in FLAGS if f"--{flag.name}" not in result.output]
    assert missing == []


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--page-size=32"], "page_size", "32"),
        (["--block-size", "32"], "page_size", "32"),
        (["-tp", "2"], "tensor_parallel_size", "2"),
        (["--enable-prefix-caching"], "enable_prefix_caching", True),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--served-model-name=a", "--served-model-name=b"], "served_model_name", ["a", "b"]),
    ],
)
def test_every_spelling(monkeypatch: pytest.MonkeyPatch, arguments: list[str], key: str, value: Value) -> None:
    """Red if another server's name of a flag, or a switch's off, which the help doesn't show, is lost."""
    taken: list[object] = []

    def serve(given: dict[str, Value], config: Path | None, ready_fd: int | None) -> int:
        taken.append(given)
        return 0

    monkeypatch.setattr("frontend.serve.serve", serve)
    assert CliRunner().invoke(app, ["serve", *arguments]).exit_code == 0
    assert taken == [{key: value}]


def test_two_spellings_of_one_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if one of two values is taken in silence."""
    monkeypatch.setattr("frontend.serve.serve", lambda *given: 0)
    result = CliRunner().invoke(app, ["serve", "--page-size=16", "--block-size=32"])
    assert result.exit_code == 2
    assert "--block-size is another word for --page-size" in result.output


@pytest.mark.parametrize("command", ["engine", "frontend", "worker"])
def test_processes_show_their_own_help(command: str) -> None:
    """Red if `greenlane engine --help` shows the wrapper's help instead of the engine core's flags."""
    script = [sys.executable, "-P", "-c", "from frontend.cli import main; main()", command, "--help"]
    result = subprocess.run(script, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {"engine": "--async-depth", "frontend": "--engine-address", "worker": "--connect"}[command] in result.stdout


def test_engine_aliases_are_the_engines() -> None:
    """Red when `serve` knows another server's name for a flag that `greenlane engine` doesn't, or the reverse."""
    ours = {flag.key: set(flag.aliases) for flag in FLAGS if To.ENGINE in flag.to}
    theirs = {flag.field: set(flag.aliases) for flag in ENGINE_FLAGS if flag.field in ours}
    assert ours == theirs


def test_version_is_the_distributions() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.output.startswith("greenlane 0.")
