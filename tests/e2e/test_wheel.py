"""A wheel built from the tree, installed elsewhere, is the whole product and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.e2e.conftest import MakeServer
from tests.e2e.harness import GUARD_S, ROOT

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git tracks, in a folder of its own: nothing untracked can slip in, nothing is left behind."""
    source = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(
        ["xargs", "-0", "cp", "--parents", "-t", str(source)], cwd=ROOT, input=tracked, check=True, timeout=GUARD_S
    )
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)],
        check=True,
    )
    (path,) = out.glob("greenlane-*.whl")
    return path


def test_wheel_holds_the_product_and_no_tests(wheel: Path) -> None:
    """Red if a data file is missing from the wheel, or if tests, scripts or the small model are in it."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    packages = {"access", "engine_core", "frontend", "greenlane", "telemetry"}
    assert tops == packages | {name for name in tops if name.endswith(".dist-info")}
    assert len(tops) == len(packages) + 1
    assert {"greenlane/engine/v1/engine.proto", "greenlane/text/v1/text.proto", "engine_core/py.typed"} <= set(names)
    folders = sorted(packages - {"greenlane"})
    tracked = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert sorted(set(tracked) - set(names)) == []
    assert [name for name in names if "test" in name or name.endswith(".safetensors")] == []


def test_installed_wheel_serves(
    wheel: Path, tmp_path: Path, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red if the installed product needs something of the source tree, or lacks its web page."""
    target = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel)], check=True
    )
    monkeypatch.setenv("PYTHONPATH", str(target))  # in front of this tree's editable installation, for all processes
    monkeypatch.chdir(tmp_path)
    code = "import engine_core, frontend, greenlane.text.v1.text_pb2 as pb\n"
    code += "print(engine_core.__file__, frontend.__file__, pb.__file__)"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(path.startswith(str(target)) for path in found.split())
    server = make_server()
    assert server.complete().json()["usage"]["completion_tokens"] == 4
    with server.client() as client:
        assert "<html" in client.get("/").raise_for_status().text
