"""`greenlane check`: whether this machine is fit to serve, and what to change where it is not.

Owns the list of findings. Torch is asked in a process of its own, the model and its checkpoint by the engine core's own
checks; the tokenizer is loaded, as a frontend would.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.table

from frontend.config import ConfigError
from frontend.tokenizer import Tokenizer

PROBE_S = 120.0
LANE_CAPABILITY = "9.0"
SM_ALIGNMENT = 8
"""Green Context partitions there: the smallest and the step."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `fit` None: it is told, but no requirement."""

    what: str
    fit: bool | None
    found: str


def check_machine(model: str | None, device: str, ports: Sequence[int]) -> list[Finding]:
    """Look at everything; touches no GPU state and starts no server."""
    torch = _probe_torch()
    findings = [_python(), _torch(torch), _driver(), _device(device), _gpu(torch, device), _lanes(torch, device)]
    if model is not None:
        findings += _model(model, device)
    return [*findings, *(_port(port) for port in ports)]


def print_findings(findings: Sequence[Finding], *, as_json: bool) -> int:
    """Print a table or JSON; the exit status: 0 fit, 1 not."""
    fit = all(finding.fit is not False for finding in findings)
    if as_json:
        sys.stdout.write(json.dumps({"fit": fit, "findings": [asdict(finding) for finding in findings]}) + "\n")
    else:
        table = rich.table.Table(box=rich.box.SIMPLE, show_header=False)
        for finding in findings:
            mark = {True: "[green]ok[/]", False: "[red]no[/]", None: "–"}[finding.fit]
            table.add_row(mark, finding.what, rich.markup.escape(finding.found))
        console = rich.console.Console()
        console.print(table)
        console.print("fit to serve" if fit else "not fit to serve: see the lines marked no")
    return 0 if fit else 1


# ------------------------------ findings


def _python() -> Finding:
    served = (3, 11) <= sys.version_info[:2] <= (3, 12)
    found = f"{platform.python_version()} ({sys.executable})"
    return Finding("Python", served, found if served else f"{found}; 3.11 and 3.12 are served")


def _probe_torch() -> dict[str, Any] | str:
    """What torch says, or why it said nothing."""
    command = [sys.executable, "-P", "-m", "engine_core.device.probe"]
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return f"torch didn't answer within {PROBE_S:.0f} s"
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"the probe ended with status {result.returncode}"]
        return lines[-1]
    probed: dict[str, Any] = json.loads(result.stdout)
    return probed


def _torch(probed: dict[str, Any] | str) -> Finding:
    if isinstance(probed, str):
        return Finding("torch", False, probed)
    build = f"CUDA {probed['cuda']} build" if probed["cuda"] else "CPU build"
    return Finding("torch", True, f"{probed['torch']}, {build}, {probed['threads']} threads")


def _driver(path: Path = Path("/proc/driver/nvidia/version")) -> Finding:
    try:
        return Finding("NVIDIA driver", None, path.read_text(encoding="utf-8").splitlines()[0])
    except (OSError, IndexError):
        return Finding("NVIDIA driver", None, "none")


def _gpu(probed: dict[str, Any] | str, device: str) -> Finding:
    gpus = [] if isinstance(probed, str) else probed["gpus"]
    wanted = device.startswith("cuda")
    if not gpus:
        return Finding("GPU", False if wanted else None, "none that torch can use; --device cpu and --device fake work")
    names = [f"{gpu['name']} (sm {gpu['capability']}, {gpu['memory_bytes'] / GIB:.0f} GiB)" for gpu in gpus]
    return Finding("GPU", None, ", ".join(names))


def _device(device: str) -> Finding:
    known = re.fullmatch(r"cpu|fake|cuda(:\d{1,3})?", device) is not None
    return Finding("device", known, device if known else f"{device!r} is none of cpu, cuda, cuda:N and fake")


def _lanes(probed: dict[str, Any] | str, device: str) -> Finding:
    """Lane modes that this version serves on this machine."""
    if device == "fake":
        return Finding("lane modes", None, "off, stream, green and auto, of a GPU that is pretended")
    if isinstance(probed, str) or not probed["gpus"]:
        return Finding("lane modes", None, "off (stream, green and auto need a GPU)")
    served = [gpu for gpu in probed["gpus"] if gpu["capability"] == LANE_CAPABILITY]
    if not served:
        return Finding("lane modes", None, f"off (the kernels are made for compute capability {LANE_CAPABILITY})")
    largest = (served[0]["sms"] - SM_ALIGNMENT) // SM_ALIGNMENT * SM_ALIGNMENT
    split = f"--decode-sms {SM_ALIGNMENT} to {largest} of {served[0]['sms']} in steps of {SM_ALIGNMENT}"
    return Finding("lane modes", None, f"off, stream, green and auto with {split}")


def _model(model: str, device: str) -> list[Finding]:
    """The engine core's own verdict on the folder and the device, and the frontend's on its tokenizer."""
    here = Path(model).is_dir()
    flags = [f"--model={model}", f"--device={device}", "--check-checkpoint" if here else "--check-flags"]
    command = [sys.executable, "-P", "-m", "engine_core", "engine", *flags]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode != 0:
        return [Finding("model", False, result.stderr.strip().removeprefix("error: "))]
    findings = [Finding("model", True, f"{model}: {_architecture(Path(model))}")]
    if here:
        try:
            findings.append(Finding("tokenizer", True, f"{Tokenizer.load(model).vocab_size} ids"))
        except ConfigError as error:
            findings.append(Finding("tokenizer", False, str(error)))
    return findings


def _architecture(folder: Path) -> str:
    """As config.json names it; a repository id has none here."""
    path = folder / "config.json"
    if not path.is_file():
        return "repository id, looked up when served"
    config = json.loads(path.read_text(encoding="utf-8"))
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return f"{config['architectures'][0]}, {size / GIB:.2f} GiB of weights"


def _port(port: int) -> Finding:
    what = f"port {port}"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            return Finding(what, False, f"can't be bound on 127.0.0.1: {reason}; --port and --grpc-port choose others")
    return Finding(what, True, "free on 127.0.0.1")
