"""What docs/deploy/ tells people to run, run: command lines, probes and the times that must fit one another."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import ssl
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from scripts.serving import GREENLANE, TINY, start
from tests.certificates import Authority, key_file
from tests.e2e.harness import GUARD_S, ROOT

pytestmark = pytest.mark.e2e
DEPLOY = ROOT / "docs" / "deploy"
SERVE_MARGIN_S = 5
"""What `serve` allows over --drain-timeout."""


class Machine:
    """This one, with files where the documents expect them."""

    def __init__(self, folder: Path) -> None:
        self.issued, keys = Authority(folder).issue("tls"), key_file(folder, "the-key")
        self._paths = {
            "/etc/greenlane/tls/tls.crt": str(self.issued.cert),
            "/etc/greenlane/tls/tls.key": str(self.issued.key),
            "/etc/greenlane/keys/keys.txt": str(keys),
            "/var/lib/greenlane/model": str(TINY),
            "/models/model": str(TINY),
            "%t": str(folder),
            "%i": "0",
        }

    def here(self, text: str) -> str:
        for path, found in self._paths.items():
            text = text.replace(path, found)
        return text


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def unit(name: str) -> dict[str, str]:
    """Settings of a unit file."""
    lines = (DEPLOY / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def container() -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod and its container."""
    deployment, _ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    pod = deployment["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


def flag(args: list[str], name: str) -> str:
    (value,) = [arg.partition("=")[2] for arg in args if arg.startswith(f"--{name}=")]
    return value


@pytest.mark.parametrize("name", ["greenlane-engine@.service", "greenlane-frontend.service"])
def test_units_have_flags_that_can_be_served(machine: Machine, name: str) -> None:
    """Red if a unit's command line has a flag that its process refuses, or is stopped before its drain is over."""
    settings = unit(name)
    program, command, *flags = shlex.split(machine.here(settings["ExecStart"]))
    assert (Path(program).name, command) == ("greenlane", name.split("@")[0].split(".")[0].removeprefix("greenlane-"))
    checked = subprocess.run(
        [*GREENLANE, command, *flags, "--check-flags"], capture_output=True, text=True, timeout=GUARD_S
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    drain = int(flags[flags.index("--drain-timeout") + 1])
    assert int(settings["TimeoutStopSec"]) > drain + SERVE_MARGIN_S


def test_the_unit_of_one_machine_serves(machine: Machine, tmp_path: Path) -> None:
    """Red if the settings of greenlane.service and serve.toml start no server, or it is stopped too early."""
    text = machine.here((DEPLOY / "serve.toml").read_text(encoding="utf-8"))
    config = tmp_path / "serve.toml"
    config.write_text(re.sub(r"(?m)^(grpc-)?port = \d+$", "", text))
    settings = unit("greenlane.service")
    assert settings["ExecStart"].endswith("greenlane serve --config /etc/greenlane/serve.toml")
    assert settings["KillMode"] == "mixed", "a second SIGTERM to a frontend would stop it at once"
    assert int(settings["TimeoutStopSec"]) > tomllib.loads(text)["drain-timeout"] + SERVE_MARGIN_S
    served = start(TINY, tmp_path / "log", [f"--config={config}", "--threads=1"])
    try:
        assert models(machine, served.http) == 200
    finally:
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(GUARD_S) == 0


def test_the_pod_serves_and_its_probes_pass(machine: Machine, tmp_path: Path) -> None:
    """Red if the container's arguments don't start a server, a probe asks what isn't there, or a pod is killed before
    its drain is over."""
    pod, serve = container()
    args = [machine.here(arg) for arg in serve["args"] if not re.match(r"--(grpc-)?port=", arg)]
    assert args.pop(0) == "serve"
    pause = int(serve["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + int(flag(args, "drain-timeout")) + SERVE_MARGIN_S
    ports = {port["name"]: str(port["containerPort"]) for port in serve["ports"]}
    assert (ports["https"], ports["grpc"]) == (flag(serve["args"], "port"), flag(serve["args"], "grpc-port"))
    served = start(TINY, tmp_path / "log", [*args, "--threads=1"])
    try:
        for probe in (serve["startupProbe"], serve["readinessProbe"]):
            get = probe["httpGet"]
            assert (get["port"], get["scheme"]) == ("https", "HTTPS")
            url = served.http.replace("0.0.0.0", "127.0.0.1")
            answer = httpx.get(f"{url}{get['path']}", verify=trusting(machine), trust_env=False, timeout=GUARD_S)
            assert answer.status_code == 200
        assert models(machine, served.http) == 200
    finally:
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(GUARD_S) == 0


def test_the_manifests_fit_together() -> None:
    """Red if a Service leads to no pod or port, or a container mounts what isn't there."""
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    pod, serve = container()
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    ports = {port["name"] for port in serve["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == ports
    mounts = {mount["name"]: mount["mountPath"] for mount in serve["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    files = [arg.partition("=")[2] for arg in serve["args"] if arg.partition("=")[2].startswith("/")]
    assert len(files) == 4
    assert [file for file in files if not any(file.startswith(f"{mount}/") for mount in mounts.values())] == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="only systemd can tell what its units mean")
@pytest.mark.parametrize("name", ["greenlane.service", "greenlane-engine@.service", "greenlane-frontend.service"])
def test_systemd_takes_the_units(tmp_path: Path, name: str) -> None:
    """Red if a setting is misspelt or in the wrong section: systemd would pass over it."""
    text = (DEPLOY / name).read_text(encoding="utf-8").replace("/opt/greenlane/.venv/bin/greenlane", "/bin/true")
    path = tmp_path / name.replace("@", "@0")
    path.write_text(text.replace("User=greenlane", "User=root").replace("Group=greenlane", "Group=root"))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", str(path)],
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    assert (verified.returncode, verified.stderr) == (0, "")


def test_the_image_copies_every_package() -> None:
    """Red if a package of the distribution isn't copied into the image."""
    copied = re.findall(r"(?m)^COPY (\w+) \1$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = project["tool"]["setuptools"]["packages"]["find"]
    packages = {pattern.removesuffix("*") for pattern in found["include"]}
    assert {*copied} == {*(packages - {"greenlane"}), "proto"}


def test_what_is_scraped_is_there() -> None:
    """Red if the alerts of docs/deploy.md ask for a metric that /metrics doesn't have."""
    from greenlane.engine.v1 import engine_pb2

    from frontend.exposition import render
    from frontend.metrics import Metrics

    text = render({1: Metrics().figures()}, [engine_pb2.GetStatsResponse()]).decode()
    asked = set(re.findall(r"greenlane_[a-z_]+\b(?=[\[ )])", (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")))
    assert len(asked) >= 4
    assert [name for name in asked if f"\n{name}{{" not in text] == []
    job = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"][0]
    assert job.get("metrics_path", "/metrics") == "/metrics"


def trusting(machine: Machine) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=machine.issued.ca)


def models(machine: Machine, http: str) -> int:
    """The status of a call with the key."""
    url = f"{http.replace('0.0.0.0', '127.0.0.1')}/v1/models"
    headers = {"authorization": "Bearer the-key"}
    return httpx.get(url, headers=headers, verify=trusting(machine), trust_env=False, timeout=GUARD_S).status_code
