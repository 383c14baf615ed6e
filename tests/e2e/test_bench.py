"""`greenlane bench` and the script that shares its load, on a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from scripts.serving import GREENLANE
from tests.certificates import Authority, key_file
from tests.e2e.conftest import MakeServer
from tests.e2e.harness import GUARD_S, ROOT, Server, until

pytestmark = pytest.mark.e2e

LOAD = ["--decoders=3", "--inject-len=300", "--qps=5", "--n=4", "--seconds=0.5"]


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command(server: Server, tmp_path: Path) -> None:
    """Red if the command's table, JSON or picture lacks a phase, or it leaves requests behind."""
    figures, plot = tmp_path / "bench.json", tmp_path / "bench.svg"
    out = run(*GREENLANE, "bench", f"--url={server.http}", *LOAD, f"--json={figures}", f"--plot={plot}")
    assert "300 tokens at 5/s" in out
    assert "aiperf, guidellm or vllm bench serve" in out
    found: dict[str, Any] = json.loads(figures.read_text())
    alone, beside = found["rows"]
    assert (alone["label"], beside["label"], found["load"]["model"]) == ("undisturbed", "injected", "tiny")
    assert (beside["n"], beside["decoders_alive"], beside["inject_len"]) == (4, 3, 300)
    assert alone["itl_p50_ms"] <= alone["itl_p99_ms"] <= alone["itl_max_ms"]
    assert alone["itl_max_ms"] > 0
    assert beside["ttft_p50_ms"] > 0
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    until(server.idle, "the decoders were ended")


def test_the_script_measures_the_same_load(server: Server) -> None:
    """Red if itl_mix.py loses a flag or a field that scripts/gpu/itl.py relies on."""
    script = str(ROOT / "scripts" / "bench" / "itl_mix.py")
    common = [f"--url={server.http}", "--model=tiny", "--vocab=4096", "--out=1500", "--label=x"]
    *_, line = run(sys.executable, script, *common, *LOAD).splitlines()
    row = json.loads(line)
    assert (row["label"], row["decoders"], row["n"], row["decoders_alive"], row["qps"]) == ("x", 3, 4, 3, 5.0)
    assert row["itl_p99_ms"] > 0
    *_, line = run(sys.executable, script, *common, "--decoders=2", "--qps=0", "--seconds=0.3").splitlines()
    assert (json.loads(line)["n"], json.loads(line)["ttft_p50_ms"]) == (0, None)


def test_a_guarded_server(make_server: MakeServer, tmp_path: Path) -> None:
    """Red if the load can't get through TLS and a key."""
    served, keys = Authority(tmp_path).issue("server"), key_file(tmp_path, "the-key")
    guards = [f"--ssl-certfile={served.cert}", f"--ssl-keyfile={served.key}", f"--api-key-file={keys}"]
    server = make_server(*guards)
    flags = [f"--ssl-ca-certs={served.ca}", f"--api-key-file={keys}"]
    assert "300 tokens at 5/s" in run(*GREENLANE, "bench", f"--url={server.http}", *LOAD, *flags)
