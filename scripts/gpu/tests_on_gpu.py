"""Runs a file of tests/gpu in a process of its own, and reads what it found and measured.

Owns the call of pytest. A test passes figures on as properties (`record_property`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any
from xml.etree import ElementTree

from scripts.gpu.options import ROOT, Options

FOLDER = ROOT / "tests" / "gpu"


def run(options: Options, file: str) -> dict[str, Any]:
    """Each test's outcome and figures by its name; `broken` names those that failed or were left out."""
    report = options.work / f"{file}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-q", "--tb=short", f"--junitxml={report}"]
    command += ["-o", "junit_family=xunit1", "-p", "no:cacheprovider", "--gpu-device", options.device]
    command += ["-W", "default"]  # what the machine's libraries warn of is not this project's
    command.append(str(FOLDER / file))
    done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
    if not report.exists():
        return {"broken": [f"pytest ended with status {done.returncode} and no report"]}
    cases = list(ElementTree.parse(report).iter("testcase"))
    tests = {str(case.get("name")): describe(case) for case in cases}
    broken = [f"{name}: {test['outcome']}" for name, test in tests.items() if test["outcome"] != "passed"]
    if not cases:
        broken.append("no test ran")
    return {**tests, "broken": broken}


def describe(case: ElementTree.Element) -> dict[str, Any]:
    outcome = next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")
    figures = {str(each.get("name")): json.loads(str(each.get("value"))) for each in case.iter("property")}
    return {"outcome": outcome, "seconds": round(float(case.get("time", 0)), 1), **figures}
