"""`greenlane serve`: settings in, supervised processes out.

Owns the merge of flags and config file, the checks before anything starts, the addresses that the processes share, and
the line that says that everything is ready.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from access.folders import private_folder
from access.policy import AccessError, is_loopback, split_address
from frontend.cli_flags import To, Value, child_argv, default_of, read_config_file
from frontend.config import ConfigError
from frontend.ports import LISTENERS, check_port, share_ports
from frontend.supervisor import Finish, Supervisor
from frontend.supervisor_process import Command, Hands, Ready, run_supervisor
from telemetry.output import tell

CORE = "engine core"
CORE_START_MARGIN_S = 15.0
"""Over --start-timeout, which bounds the load itself."""
FRONTEND_START_S = 120.0
SILENCE_S = 5.0
"""Without a sign of life for this long, a process counts as frozen and is killed."""
MAX_FRONTENDS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """What `serve` will start."""

    engine_address: str
    engine: list[str]
    """Command line of the engine core."""
    frontends: list[list[str]]
    start_timeout: float
    drain_timeout: float
    ports: list[tuple[str, str, int]]
    """Addresses, flags and ports of the frontends; those that may be any are left out."""


def serve(given: Mapping[str, Value], config: Path | None, ready_fd: int | None) -> int:
    """Run until stopped; the exit status. Settings that can't be served are refused here, with status 2."""
    from_file: dict[str, Value] = {}
    try:
        from_file = read_config_file(config) if config else {}
        with _stoppable(), private_folder() as folder:
            finish = _supervise({**from_file, **given}, folder, ready_fd)
        say(finish.cause)
        return finish.status
    except _Stopped:
        say("stopped by signal")
        return 0
    except (AccessError, ConfigError) as error:
        say(f"error: {error}{_whereabouts(str(error), config, from_file.keys() - given.keys())}")
        return 2


class _Stopped(BaseException):
    """A signal arrived while nothing was started yet that would have to be ended in order."""


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Signals raise `_Stopped`, so that the folder goes, until the supervisor takes them over."""

    def stop(*_: object) -> None:
        raise _Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _supervise(values: Mapping[str, Value], folder: Path, ready_fd: int | None) -> Finish:
    """Check every setting, then run the processes to their end. Raises ConfigError."""
    plan = make_plan(values, folder)
    check_flags(plan.engine, *plan.frontends[:1])
    for host, flag, port in plan.ports:
        check_port(host, flag, port)
    with contextlib.ExitStack() as held:
        if len(plan.frontends) > 1:
            plan = make_plan({**values, **share_ports(values, held)}, folder)
        return run_supervisor(functools.partial(_hands, plan, ready_fd))


def _whereabouts(message: str, config: Path | None, keys: Set[str]) -> str:
    """Which of the flags that a refusal names stand in the config file: the message alone speaks of a command line."""
    named = [key.replace("_", "-") for key in sorted(keys)]
    found = [name for name in named if re.search(rf"--{re.escape(name)}(?![\w-])", message)]
    return f" (--config {config}: {', '.join(found)})" if found else ""


def say(text: str) -> None:
    """A line about the processes, for the person who watches."""
    tell(sys.stderr, f"greenlane: {text}\n")


# ------------------------------ settings


def make_plan(values: Mapping[str, Value], folder: Path) -> Plan:
    """Command lines from flag values; `folder` is private and holds the engine core's socket by default."""
    if "model" not in values:
        raise ConfigError("--model is missing: a folder with config.json, or a repository id")
    address = str(values.get("engine_address", f"unix:{folder / 'engine.sock'}"))
    count = _number(values, "frontends")
    if not 1 <= count <= MAX_FRONTENDS:
        raise ConfigError(f"--frontends is {count}; it must be from 1 to {MAX_FRONTENDS}")
    python = [sys.executable, "-P", "-m"]
    session = [f"--engine-address={address}", "--engine-restarts"]
    frontends = [
        [*python, "frontend", *session, *_place(folder, place, count), *child_argv(values, To.FRONTEND)]
        for place in range(1, count + 1)
    ]
    return Plan(
        engine_address=address,
        engine=[*python, "engine_core", "engine", *_listen(address), *child_argv(values, To.ENGINE)],
        frontends=frontends,
        start_timeout=_seconds(values, "start_timeout"),
        drain_timeout=_seconds(values, "drain_timeout"),
        ports=[
            (each.address(values), each.flag, port)
            for each in LISTENERS
            if each.served(values) and (port := _number(values, each.port))
        ],
    )


def _place(folder: Path, place: int, count: int) -> list[str]:
    """What tells a frontend of the others, where there are any."""
    return [f"--peers={folder}", f"--place={place}", f"--places={count}"] if count > 1 else []


def _listen(address: str) -> list[str]:
    """The engine core's own flags for its address."""
    if "," in address:
        raise ConfigError(
            f"--engine-address is {address!r}, and `serve` starts one engine core; for several start each with "
            "`greenlane engine`, and `greenlane frontend` before them"
        )
    if address.startswith("unix:"):
        return [f"--address={address}"]
    place = split_address(address)
    if place is None:
        raise ConfigError(f"--engine-address is {address!r}; it must be unix:/path or host:port")
    host, port = place
    if not is_loopback(host):
        raise ConfigError(
            f"--engine-address: {host} is not loopback, and `serve` keeps its engine core to this machine; for "
            "frontends elsewhere start `greenlane engine --address` by itself"
        )
    if port == 0:
        raise ConfigError(
            f"--engine-address {address}: the port must be from 1 to 65535, since frontends connect to it"
        )
    return [f"--address={address}"]


def _number(values: Mapping[str, Value], key: str) -> int:
    try:
        return int(str(values[key] if key in values else default_of(key)))
    except ValueError:
        raise ConfigError(f"--{key.replace('_', '-')} is {values[key]!r}; it must be a whole number") from None


def _seconds(values: Mapping[str, Value], key: str) -> float:
    try:
        return float(str(values.get(key, default_of(key))))
    except ValueError:
        raise ConfigError(f"--{key.replace('_', '-')} is {values[key]!r}; it must be a number of seconds") from None


def check_flags(*commands: Sequence[str]) -> None:
    """Let processes check their own flags, side by side, without starting anything. Raises ConfigError with what the
    first that refuses says."""
    checks = [
        subprocess.Popen(
            [*argv, "--check-flags"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for argv in commands
    ]
    try:
        said = [check.communicate()[1].strip() for check in checks]
    finally:
        for check in checks:
            check.kill()
    for argv, check, message in zip(commands, checks, said, strict=True):
        if check.returncode != 0:
            reason = message or f"{' '.join(argv[3:])} --check-flags ended with {check.returncode}"
            raise ConfigError(reason.removeprefix("error: "))


# ------------------------------ processes


def frontend_names(count: int) -> list[str]:
    return [f"frontend {place + 1}" for place in range(count)]


def _hands(plan: Plan, ready_fd: int | None) -> Hands:
    names = frontend_names(len(plan.frontends))
    bounds = {CORE: plan.start_timeout + CORE_START_MARGIN_S, **dict.fromkeys(names, FRONTEND_START_S)}
    commands = [Command(CORE, lambda _: plan.engine)]
    commands += [
        Command(name, functools.partial(_frontend_argv, argv)) for name, argv in zip(names, plan.frontends, strict=True)
    ]
    return Hands(
        Supervisor(CORE, names, bounds, plan.drain_timeout),
        commands,
        silence_bound=SILENCE_S,
        say=say,
        announce=functools.partial(announce, plan.engine_address, ready_fd),
    )


def _frontend_argv(argv: Sequence[str], previous: Ready | None) -> list[str]:
    """A restarted frontend takes the ports that it announced, so that its clients find it again."""
    if previous is None:
        return [*argv]
    announced = [each for each in LISTENERS if each.kind in previous]
    return [*argv, *(f"{each.flag}={str(previous[each.kind]).rpartition(':')[2]}" for each in announced)]


def announce(engine_address: str, ready_fd: int | None, ready: Mapping[str, Ready], pids: Mapping[str, int]) -> None:
    """Say in one line what serves where; as JSON to `ready_fd` too, for programs."""
    frontends = [ready[name] for name in frontend_names(len(ready) - 1)]
    listening = [each for each in LISTENERS if each.kind in frontends[0]]
    served = {each.kind: sorted({frontend[each.kind] for frontend in frontends}) for each in listening}
    places = " · ".join(f"{each.spoken} {' '.join(served[each.kind])}" for each in listening)
    tell(sys.stdout, f"ready: {places} · engine {engine_address}{_lanes(ready)}\n")
    if ready_fd is not None:
        message = {**served, "engine": engine_address, "pids": pids, **_info(ready)}
        with contextlib.suppress(BrokenPipeError), os.fdopen(ready_fd, "w") as pipe:
            pipe.write(json.dumps(message) + "\n")


def _lanes(ready: Mapping[str, Ready]) -> str:
    """What is in force where prefill may have a lane of its own."""
    lanes = _info(ready)["info"].get("lanes", {})
    if lanes.get("overlap", "off") == "off":
        return ""
    decode, prefill = lanes["decode_sms"], lanes["prefill_sms"]
    split = f"{decode} SMs beside {prefill}, in steps of {lanes['sm_alignment']}"
    if choices := lanes["decode_sms_choices"]:
        split = f"{', '.join(map(str, choices))} of {decode + prefill} SMs for decode"
    return f" · lanes {lanes['overlap']}{f' ({split})' if decode else ''}"


def _info(ready: Mapping[str, Ready]) -> dict[str, Any]:
    return {"info": ready[CORE].get("info", {})}
