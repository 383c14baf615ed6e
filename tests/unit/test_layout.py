"""Who may import whom, and what may appear nowhere: checked over the syntax trees of the product's own files.

Each rule is a table or a pattern here; a change of the architecture changes this file. `test_rules_see_violations`
shows that the rules bite.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("access", "engine_core", "frontend", "telemetry")

PLAIN = ("engine_core.config", "engine_core.errors", "engine_core.request", "engine_core.step")
PLAIN_MODEL = (*PLAIN, "engine_core.model_config")
POLICY_NAMES = (
    "cache",
    "ledger",
    "scheduling.deadlines",
    "scheduling.decoding",
    "scheduling.flight",
    "scheduling.grammars",
    "scheduling.open_sequences",
    "scheduling.outputs",
    "scheduling.policy",
    "scheduling.residency",
    "scheduling.results",
    "scheduling.rows",
    "scheduling.sequence",
    "scheduling.step_model",
    "scheduling.tally",
    "scheduling.waiting",
)
BOOKKEEPING = tuple(f"engine_core.{name}" for name in POLICY_NAMES)
"""Pure policy and bookkeeping below the scheduler."""

INTERNAL_IMPORTS: dict[str, tuple[str, ...]] = {
    # the module or package on the left imports only these of the project's own (and itself)
    "engine_core.config": (*PLAIN, "access.policy"),
    "engine_core.errors": PLAIN,
    "engine_core.request": PLAIN,
    "engine_core.step": PLAIN,
    "engine_core.model_config": PLAIN,
    **dict.fromkeys(BOOKKEEPING, (*PLAIN_MODEL, *BOOKKEEPING)),
    "engine_core.scheduling.scheduler": (*PLAIN_MODEL, *BOOKKEEPING),
    "engine_core.engine": (*PLAIN_MODEL, *BOOKKEEPING, "engine_core.scheduling.scheduler", "engine_core.executor.base"),
    "engine_core.outbox": (*PLAIN_MODEL, "greenlane"),
    "engine_core.session": (*PLAIN_MODEL, "engine_core.outbox", "greenlane"),
    "engine_core.executor": (*PLAIN_MODEL, "engine_core.log"),
    "engine_core.models": (*PLAIN_MODEL, "engine_core.ops"),
    "engine_core.ops": PLAIN_MODEL,
    "frontend": ("access", "greenlane", "telemetry"),
    "telemetry": (),
    "access": (),
}
PURE = (*PLAIN_MODEL, *BOOKKEEPING, "engine_core.scheduling.scheduler", "engine_core.engine", "engine_core.session")
IMPURE_LIBRARIES = ("torch", "zmq", "grpc", "asyncio", "socket", "subprocess", "threading", "uvloop")
TORCH_HOMES = ("engine_core.worker", "engine_core.device", "engine_core.models", "engine_core.ops")
GRPC_HOMES = ("access", "frontend", *(f"engine_core.{name}" for name in ("server", "service", "health", "main")))
ZMQ_HOMES = ("engine_core.executor",)
GRAMMAR_HOMES = ("engine_core.worker.grammar", "engine_core.worker.constraints")
LIBRARY_HOMES = {"torch": TORCH_HOMES, "grpc": GRPC_HOMES, "zmq": ZMQ_HOMES, "llguidance": GRAMMAR_HOMES}
CUDA_HOMES = (
    "engine_core.device.cuda",
    "engine_core.device.green",
    "engine_core.device.driver",
    "engine_core.device.probe",
    "engine_core.worker.graphs",
    "engine_core.ops.cuda",
)
ENVIRONMENT_READERS = ("access.folders", "engine_core.executor.processes")
"""The first asks where the private folder of local sockets belongs (XDG_RUNTIME_DIR); the second hands its own
environment on to a worker. No behaviour depends on a variable."""
UNSAFE_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
PRODUCT_UNSAFE_MODULES = ("multiprocessing",)
"""It pickles what it hands over and forks by default; tests may spread pure work with its spawn context."""
UNSAFE_CALLS = ("torch.load", "os.fork", "os.forkpty", "pty.fork", "os.system", "eval", "exec")


@dataclass(frozen=True)
class Module:
    name: str
    tree: ast.Module
    path: Path

    def imports(self, *, top_level: bool = False) -> Iterator[str]:
        """Full names of everything imported, `from a import b` as both a and a.b."""
        for node in self.tree.body if top_level else ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno}: relative import"
                assert node.module is not None
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def dotted_names(self) -> Iterator[str]:
        """Every `a.b.c` and bare name that the code mentions."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Attribute, ast.Name)):
                yield ast.unparse(node)


def parse(name: str, source: str, path: Path = Path("sample.py")) -> Module:
    return Module(name, ast.parse(source), path)


def load(*folders: str) -> list[Module]:
    modules = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            modules.append(parse(name, path.read_text(encoding="utf-8"), path))
    return modules


PRODUCT = load(*PACKAGES)
EVERYTHING = [*PRODUCT, *load("scripts", "tests")]


def within(name: str, homes: tuple[str, ...]) -> bool:
    return any(name == home or name.startswith(f"{home}.") for home in homes)


Rule = Callable[[Module], Iterator[str]]


# ------------------------------ the rules: each yields what breaks it


def misplaced_imports(module: Module) -> Iterator[str]:
    """Imports between the project's own packages that INTERNAL_IMPORTS doesn't allow."""
    for home, allowed in INTERNAL_IMPORTS.items():
        if within(module.name, (home,)):
            for name in module.imports():
                if within(name, (*PACKAGES, "greenlane")) and not within(name, (home, *allowed)):
                    yield f"{module.name} imports {name}"
    if within(module.name, ("engine_core",)) and any(within(name, ("frontend",)) for name in module.imports()):
        yield f"{module.name} imports frontend"
    if module.name.startswith("engine_core.executor"):
        yield from (f"{module.name} imports {name}" for name in module.imports() if "engine_core.worker" in name)


def misplaced_libraries(module: Module) -> Iterator[str]:
    """Libraries outside the places that may use them."""
    for library, homes in LIBRARY_HOMES.items():
        if any(within(name, (library,)) for name in module.imports()) and not within(module.name, homes):
            yield f"{module.name} imports {library}"
    if within(module.name, PURE):
        yield from (f"{module.name} imports {name}" for name in module.imports() if within(name, IMPURE_LIBRARIES))
    if module.name == "engine_core.worker.runner":
        yield from (f"{module.name}: {name}" for name in module.imports(top_level=True) if within(name, ("torch",)))


def cuda_names(module: Module) -> Iterator[str]:
    if within(module.name, CUDA_HOMES):
        return
    yield from (f"{module.name} imports {name}" for name in module.imports() if within(name, ("cuda", "torch.cuda")))
    yield from (f"{module.name} says {name}" for name in module.dotted_names() if within(name, ("torch.cuda",)))


def unsafe_code(module: Module) -> Iterator[str]:
    unsafe = UNSAFE_MODULES + (PRODUCT_UNSAFE_MODULES if within(module.name, PACKAGES) else ())
    yield from (f"{module.name} imports {name}" for name in module.imports() if within(name, unsafe))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in UNSAFE_CALLS:
                yield f"{module.name}:{node.lineno} calls {ast.unparse(node.func)}"
            for keyword in node.keywords:
                if (
                    keyword.arg in ("allow_pickle", "trust_remote_code", "shell")
                    and ast.unparse(keyword.value) != "False"
                ):
                    yield f"{module.name}:{node.lineno} passes {keyword.arg}"


def hidden_control(module: Module) -> Iterator[str]:
    """Environment variables as switches, and logic that runs when the garbage collector likes."""
    if not within(module.name, ENVIRONMENT_READERS):
        names = ("os.environ", "os.getenv", "os.environb")
        yield from (f"{module.name} reads {name}" for name in module.dotted_names() if within(name, names))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            yield f"{module.name}:{node.lineno} defines __del__"


# ------------------------------ tests


@pytest.mark.parametrize("rule", [misplaced_imports, misplaced_libraries, cuda_names, hidden_control])
def test_product_keeps_the_rules(rule: Rule) -> None:
    """Red when a file of the product imports across a border, or is steered by the environment."""
    assert [line for module in PRODUCT for line in rule(module)] == []


def test_nothing_unsafe_anywhere() -> None:
    """Red when any file, tests and scripts included, unpickles, forks, evaluates text or lets a library do so."""
    assert [line for module in EVERYTHING for line in unsafe_code(module)] == []


def test_every_module_says_what_it_owns() -> None:
    """Red when a module has no docstring (package markers may be empty)."""
    assert [module.name for module in PRODUCT if module.tree.body and not ast.get_docstring(module.tree)] == []


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (misplaced_imports, "frontend.generate", "from engine_core.request import Request"),
        (misplaced_imports, "engine_core.service", "import frontend.config"),
        (misplaced_imports, "access.keys", "from frontend.config import ConfigError"),
        (misplaced_imports, "engine_core.scheduling.scheduler", "from engine_core import engine"),
        (misplaced_imports, "engine_core.engine", "def f():\n    from engine_core.executor.zmq import ZmqExecutor"),
        (misplaced_imports, "engine_core.engine", "from greenlane.engine.v1 import engine_pb2"),
        (misplaced_imports, "engine_core.ops.attention", "import engine_core.worker.runner"),
        (misplaced_imports, "engine_core.models.dense", "from engine_core.executor import channel"),
        (misplaced_imports, "engine_core.executor.zmq", "from engine_core.worker import worker"),
        (misplaced_libraries, "engine_core.cache.pages", "import zmq"),
        (misplaced_libraries, "engine_core.ledger", "import threading"),
        (misplaced_libraries, "engine_core.session", "import grpc.aio"),
        (misplaced_libraries, "frontend.check", "def f():\n    import torch"),
        (misplaced_libraries, "engine_core.worker.runner", "import torch"),
        (misplaced_libraries, "engine_core.session", "import llguidance"),
        (cuda_names, "engine_core.worker.runner", "def f(torch):\n    torch.cuda.synchronize()"),
        (cuda_names, "engine_core.device.lanes", "from cuda.bindings import driver"),
        (unsafe_code, "tests.unit.x", "import pickle"),
        (unsafe_code, "engine_core.host", "import multiprocessing"),
        (unsafe_code, "scripts.x", "import torch\ntorch.load('x')"),
        (unsafe_code, "scripts.x", "import os\nos.fork()"),
        (unsafe_code, "scripts.x", "numpy.load(path, allow_pickle=True)"),
        (hidden_control, "engine_core.worker.runner", "import os\nif os.environ.get('X'):\n    pass"),
        (hidden_control, "engine_core.device.lanes", "class A:\n    def __del__(self):\n        pass"),
    ],
)
def test_rules_see_violations(rule: Rule, name: str, source: str) -> None:
    """Red when a rule stops seeing what it is for."""
    assert list(rule(parse(name, source)))
