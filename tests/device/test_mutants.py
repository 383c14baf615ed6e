"""Each recorded mutant (`mutants/*.patch`) turns its test red: a guard that could go missing unnoticed fails here.

A patch names its rule, says what it breaks, and names the test that must fail. The tree is copied for each of them,
patched, and the test run there by a pytest of its own; it must fail on what it asserts, not on code that doesn't load.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MUTANTS = sorted((Path(__file__).parent / "mutants").glob("*.patch"))
COPIED = ("access", "engine_core", "proto", "telemetry", "tests", "pyproject.toml")
NOT_COPIED = shutil.ignore_patterns("fixtures", "mutants")
RULES = [f"{family}{number}" for family, count in (("L", 7), ("E", 7), ("O", 15)) for number in range(1, count + 1)]
BROKEN = ("ImportError", "ModuleNotFoundError", "NameError", "AttributeError", "SyntaxError", "TypeError", "fixture")
"""How a mutant fails that only doesn't load or run: it proves nothing."""
GUARD_S = 120.0


@dataclass(frozen=True)
class Mutant:
    """A patch and its header."""

    patch: Path
    rule: str
    test: str

    @classmethod
    def read(cls, patch: Path) -> Mutant:
        header = dict(re.findall(r"^(Rule|Test): (.+)$", patch.read_text(encoding="utf-8"), re.MULTILINE))
        return cls(patch, header["Rule"], header["Test"])


def verdict(mutant: Mutant, folder: Path) -> str:
    """The line in which the mutant's test says why it failed. Raises AssertionError when it didn't, or wrongly."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=NOT_COPIED)
        else:
            shutil.copy2(source, folder / name)
    (folder / "tests" / "fixtures").symlink_to(ROOT / "tests" / "fixtures")
    applied = run(["git", "apply", str(mutant.patch)], folder)
    assert applied.returncode == 0, f"{mutant.patch.name} no longer applies: {applied.stderr}"
    options = ["-q", "-x", "-p", "no:cacheprovider", "--tb=line"]
    played = run([sys.executable, "-m", "pytest", *options, mutant.test], folder)
    failures = [line for line in played.stdout.splitlines() if line.startswith("FAILED ")]
    assert played.returncode == 1, f"{mutant.patch.name} was not caught by {mutant.test}:\n{played.stdout[-2000:]}"
    assert failures, f"{mutant.patch.name} broke the test run:\n{played.stdout[-2000:]}"
    assert not any(how in failures[0] for how in BROKEN), f"{mutant.patch.name} doesn't run: {failures[0]}"
    return failures[0].removeprefix("FAILED ")


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The copy stands for itself: neither an enclosing repository nor settings of the outer pytest count."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GIT_"))}
    environment |= {"GIT_CEILING_DIRECTORIES": str(folder.parent), "COLUMNS": "1000"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=GUARD_S, check=False
    )


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Path, Future[str]]]:
    """The selected mutants' runs, as many at a time as there are cores."""
    selected = [
        item.callspec.params["patch"]
        for item in request.session.items
        if hasattr(item, "callspec") and item.fspath == request.node.fspath and "patch" in item.callspec.params
    ]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield {
            patch: pool.submit(verdict, Mutant.read(patch), tmp_path_factory.mktemp(patch.stem)) for patch in selected
        }


@pytest.mark.parametrize("patch", MUTANTS, ids=lambda patch: patch.stem)
def test_every_mutant_is_caught(patch: Path, verdicts: dict[Path, Future[str]]) -> None:
    """Red when a rule's guard can go missing without its test failing, or a patch no longer fits the code."""
    print(f"{patch.stem}: caught by {verdicts[patch].result()}")


def test_every_rule_has_a_mutant() -> None:
    """Red when a rule of OWNERSHIP.md loses its last mutant, or a patch names no rule."""
    mutated = {Mutant.read(patch).rule for patch in MUTANTS}
    assert mutated == {*RULES, "S1", "S2", "S3", "S5", "S6", "S7", "S8"}
