"""The supervisor's rules, as values: events and times in, instructions out. No process is started here."""

from __future__ import annotations

import pytest

from frontend.supervisor import (
    DRAIN_MARGIN_S,
    FIRST_DELAY_S,
    MAX_RESTARTS,
    RESTART_WINDOW_S,
    STOP_S,
    Announce,
    Finish,
    Instruction,
    Kill,
    Say,
    Start,
    Supervisor,
    Terminate,
    describe_status,
)

CORE, ONE, TWO = "engine core", "frontend 1", "frontend 2"
BOUNDS = {CORE: 600.0, ONE: 60.0, TWO: 60.0}


def acts(instructions: list[Instruction]) -> list[Instruction]:
    """Without what is only said."""
    return [each for each in instructions if not isinstance(each, Say)]


def said(instructions: list[Instruction]) -> str:
    return "\n".join(each.text for each in instructions if isinstance(each, Say))


def serving(*frontends: str) -> Supervisor:
    """A supervisor at time 0 whose processes are all ready."""
    supervisor = Supervisor(CORE, frontends, BOUNDS)
    supervisor.begin(0.0)
    for name in (CORE, *frontends):
        supervisor.ready(name, 0.0)
    return supervisor


def test_frontends_start_after_the_core_and_ready_is_announced_once() -> None:
    """Red if a core that is ready before its first sign of life is heard gets no frontends, or if a part of the system
    is announced as the whole."""
    supervisor = Supervisor(CORE, (ONE, TWO), BOUNDS)
    assert acts(supervisor.begin(0.0)) == [Start(CORE)]
    assert acts(supervisor.ready(CORE, 1.0)) == [Start(ONE), Start(TWO)]
    assert acts(supervisor.ready(TWO, 2.0)) == []
    assert acts(supervisor.ready(ONE, 3.0)) == [Announce()]
    supervisor.exited(ONE, -9, 4.0)
    supervisor.tick(4.0 + FIRST_DELAY_S)
    assert acts(supervisor.ready(ONE, 5.0)) == []


def test_frontends_get_ready_while_the_core_loads() -> None:
    """Red if frontends start before their core listens, or only once it is ready; if one that waits for its core is
    killed for that, or one that doesn't get ready behind it never is."""
    supervisor = Supervisor(CORE, (ONE, TWO), BOUNDS)
    supervisor.begin(0.0)
    assert supervisor.lives(ONE, 0.5) == []
    assert acts(supervisor.lives(CORE, 1.0)) == [Start(ONE), Start(TWO)]
    assert supervisor.lives(CORE, 2.0) == []
    assert supervisor.tick(BOUNDS[CORE] - 1.0) == []
    assert supervisor.next_deadline() == BOUNDS[CORE]
    assert acts(supervisor.ready(CORE, 500.0)) == []
    assert acts(supervisor.ready(ONE, 501.0)) == []
    assert supervisor.next_deadline() == 500.0 + BOUNDS[TWO]
    assert acts(supervisor.tick(500.0 + BOUNDS[TWO])) == [Kill(TWO)]


def test_a_frontend_waits_for_a_core_that_was_lost_before_it_was_ready() -> None:
    """Red if a frontend is killed as too slow while the core, lost right after its start, loads again for minutes."""
    supervisor = Supervisor(CORE, (ONE,), BOUNDS)
    supervisor.begin(0.0)
    supervisor.ready(CORE, 1.0)
    supervisor.exited(CORE, -9, 2.0)
    assert acts(supervisor.tick(2.0 + FIRST_DELAY_S)) == [Start(CORE)]
    assert supervisor.tick(2.0 + BOUNDS[ONE]) == []
    supervisor.ready(CORE, 500.0)
    assert supervisor.next_deadline() == 500.0 + BOUNDS[ONE]


def test_a_frontend_that_fails_while_the_core_loads_is_started_again() -> None:
    """Red if its delay is forgotten when the core becomes ready, or its new start has no bound behind that."""
    supervisor = Supervisor(CORE, (ONE,), BOUNDS)
    supervisor.begin(0.0)
    supervisor.lives(CORE, 1.0)
    supervisor.exited(ONE, 1, 2.0)
    supervisor.ready(CORE, 2.0)
    assert supervisor.next_deadline() == 2.0 + FIRST_DELAY_S
    assert supervisor.tick(2.1) == []
    assert supervisor.tick(2.0 + FIRST_DELAY_S) == [Start(ONE)]
    assert supervisor.next_deadline() == 2.0 + FIRST_DELAY_S + BOUNDS[ONE]


def test_a_restarted_core_leaves_its_frontends_running() -> None:
    """Red if the loss of the core restarts or terminates a frontend: frontends reconnect by themselves."""
    supervisor = serving(ONE)
    assert acts(supervisor.exited(CORE, -9, 10.0)) == []
    assert supervisor.next_deadline() == 10.0 + FIRST_DELAY_S
    assert supervisor.tick(10.0) == []
    assert supervisor.tick(10.0 + FIRST_DELAY_S) == [Start(CORE)]
    assert said(supervisor.ready(CORE, 12.0)) == "the engine core is serving again"


def test_delays_double_and_the_limit_ends_everything() -> None:
    """Red if restarts are not spaced out, or if the restart after the last allowed one still happens."""
    supervisor = serving(ONE)
    now = 0.0
    for attempt in range(MAX_RESTARTS):
        assert f"restart {attempt + 1} of {MAX_RESTARTS}" in said(supervisor.exited(CORE, 1, now))
        due = supervisor.next_deadline()
        assert due is not None
        assert due == pytest.approx(now + FIRST_DELAY_S * 2**attempt)
        assert supervisor.tick(due) == [Start(CORE)]
        now = due + 1.0
    assert acts(supervisor.exited(CORE, 1, now)) == [Terminate(ONE)]
    (finish,) = supervisor.exited(ONE, 0, now + 0.1)
    assert isinstance(finish, Finish)
    assert finish.status == 1
    assert finish.cause == "the engine core ended with status 1, after 5 restarts within 5 minutes"


def test_old_restarts_are_forgotten() -> None:
    """Red if the rate limit counts restarts for ever: a crash a day would end a long-lived server."""
    supervisor = serving(ONE)
    for day in range(3 * MAX_RESTARTS):
        now = day * (RESTART_WINDOW_S + 1)
        assert f"restart 1 of {MAX_RESTARTS}" in said(supervisor.exited(CORE, 1, now))
        supervisor.tick(now + FIRST_DELAY_S)
        supervisor.ready(CORE, now + 2)


@pytest.mark.parametrize("name", [CORE, ONE])
def test_refused_settings_end_everything_with_status_2(name: str) -> None:
    """Red if a configuration error is retried: no restart can help."""
    supervisor = serving(ONE)
    other = ONE if name == CORE else CORE
    assert acts(supervisor.exited(name, 2, 1.0)) == [Terminate(other)]
    assert supervisor.exited(other, 0, 1.5) == [Finish(2, f"the {name} refused its settings")]


def test_refused_settings_before_anything_else_ran() -> None:
    """Red if the end of the only process leaves the supervisor waiting."""
    supervisor = Supervisor(CORE, (ONE,), BOUNDS)
    supervisor.begin(0.0)
    assert supervisor.exited(CORE, 2, 1.0) == [Finish(2, "the engine core refused its settings")]


def test_a_silent_process_is_killed_once_and_restarted() -> None:
    """Red if a frozen core (SIGSTOP) is left alone, killed twice or not restarted."""
    supervisor = serving(ONE)
    assert supervisor.silent(CORE, 5.0) == [Kill(CORE)]
    assert supervisor.silent(CORE, 6.0) == []
    assert "showed no sign of life for 5.0 s" in said(supervisor.exited(CORE, -9, 6.0))
    assert supervisor.tick(6.0 + FIRST_DELAY_S) == [Start(CORE)]


def test_a_process_that_is_never_ready_is_killed() -> None:
    """Red if the start has no bound."""
    supervisor = Supervisor(CORE, (ONE,), BOUNDS)
    supervisor.begin(0.0)
    assert supervisor.next_deadline() == BOUNDS[CORE]
    assert supervisor.tick(BOUNDS[CORE]) == [Kill(CORE)]
    assert supervisor.tick(BOUNDS[CORE] + 1) == []
    assert "was not ready after 600 s" in said(supervisor.exited(CORE, -9, BOUNDS[CORE] + 1))


def test_the_first_signal_drains_frontends_before_the_core() -> None:
    """Red if the core is asked to end while a frontend still finishes its requests."""
    supervisor = serving(ONE, TWO)
    assert acts(supervisor.signalled(1.0)) == [Terminate(ONE), Terminate(TWO)]
    assert supervisor.exited(ONE, 0, 2.0) == []
    assert supervisor.exited(TWO, 0, 3.0) == [Terminate(CORE)]
    assert supervisor.exited(CORE, 0, 4.0) == [Finish(0, "stopped by signal")]


def test_the_second_signal_stops_at_once_and_the_third_kills() -> None:
    """Red if a stuck process can hold up an impatient person for longer than STOP_S."""
    supervisor = serving(ONE)
    supervisor.signalled(1.0)
    assert acts(supervisor.signalled(2.0)) == [Terminate(CORE), Terminate(ONE)]
    assert supervisor.next_deadline() == 2.0 + STOP_S
    assert supervisor.signalled(2.5) == [Kill(CORE), Kill(ONE)]
    assert supervisor.tick(2.0 + STOP_S) == [Kill(CORE), Kill(ONE)]
    assert supervisor.exited(CORE, -9, 4.1) == []
    assert supervisor.exited(ONE, -9, 4.2) == [Finish(0, "stopped by signal")]


def test_a_signal_while_a_restart_is_due_starts_nothing() -> None:
    """Red if a stopping supervisor starts a process again."""
    supervisor = serving(ONE)
    supervisor.exited(CORE, 1, 1.0)
    assert acts(supervisor.signalled(1.1)) == [Terminate(ONE)]
    assert supervisor.tick(1.0 + FIRST_DELAY_S) == []
    assert supervisor.exited(ONE, 0, 2.0) == [Finish(0, "stopped by signal")]


def test_a_signal_while_the_core_loads_ends_it() -> None:
    """Red if Ctrl-C during start-up waits for frontends that don't exist yet."""
    supervisor = Supervisor(CORE, (ONE,), BOUNDS)
    supervisor.begin(0.0)
    assert acts(supervisor.signalled(1.0)) == [Terminate(CORE)]
    assert supervisor.ready(CORE, 1.1) == []
    assert supervisor.exited(CORE, 0, 2.0) == [Finish(0, "stopped by signal")]


def test_a_failure_while_draining_is_not_a_clean_stop() -> None:
    """Red if requests lost during a drain are reported as status 0."""
    supervisor = serving(ONE)
    supervisor.signalled(1.0)
    supervisor.exited(CORE, -9, 2.0)
    assert supervisor.exited(ONE, 0, 3.0) == [Finish(1, "the engine core was killed by SIGKILL while draining")]


def test_a_stop_while_starting_is_a_clean_one() -> None:
    """Red if Ctrl-C before everything is ready ends as a failure, because a process that still imported its modules was
    ended by the signal that it was sent; or if any other end of such a process passes for a clean one."""
    for status, end in ((-15, Finish(0, "stopped by signal")), (-11, None), (1, None)):
        supervisor = Supervisor(CORE, (ONE,), BOUNDS)
        supervisor.begin(0.0)
        supervisor.ready(CORE, 1.0)
        assert acts(supervisor.signalled(2.0)) == [Terminate(ONE)]
        assert supervisor.exited(ONE, status, 2.1) == [Terminate(CORE)]
        (finish,) = supervisor.exited(CORE, 0, 2.2)
        assert isinstance(finish, Finish)
        assert finish == end or (end is None and finish.status == 1)


def test_who_falls_silent_while_draining_is_killed_and_named() -> None:
    """Red if a frozen frontend keeps its clients waiting until the drain's bound, or the engine core goes before it or
    is blamed."""
    supervisor = serving(ONE, TWO)
    supervisor.signalled(1.0)
    assert supervisor.exited(TWO, 0, 2.0) == []
    assert supervisor.silent(ONE, 5.0) == [Kill(ONE)]
    assert supervisor.silent(ONE, 6.0) == []
    assert supervisor.exited(ONE, -9, 7.0) == [Terminate(CORE)]
    cause = f"the {ONE} showed no sign of life for 5.0 s and was killed"
    assert supervisor.exited(CORE, 0, 8.0) == [Finish(1, cause)]


def test_an_engine_core_that_falls_silent_while_draining_is_killed() -> None:
    """Red if frontends that wait for a frozen engine core hold up the stop until the drain's bound."""
    supervisor = serving(ONE)
    supervisor.signalled(1.0)
    assert supervisor.silent(CORE, 5.0) == [Kill(CORE)]
    assert supervisor.exited(CORE, -9, 6.0) == []
    cause = f"the {CORE} showed no sign of life for 5.0 s and was killed"
    assert supervisor.exited(ONE, 0, 6.1) == [Finish(1, cause)]
    alone = serving(ONE)
    alone.signalled(1.0)
    assert alone.exited(ONE, 0, 1.1) == [Terminate(CORE)]
    assert alone.silent(CORE, 5.0) == [Kill(CORE)]
    assert alone.exited(CORE, -9, 6.0) == [Finish(1, cause)]


def test_who_takes_longer_than_the_drains_bound_is_killed_and_named() -> None:
    """Red if the engine core is killed with the frontends it waits for, or isn't when it takes longer than they did."""
    supervisor = serving(ONE, TWO)
    supervisor.signalled(1.0)
    bound = 31.0 + DRAIN_MARGIN_S
    assert supervisor.next_deadline() == bound
    assert supervisor.exited(TWO, 0, 2.0) == []
    assert supervisor.tick(bound - 0.1) == []
    assert supervisor.tick(bound) == [Kill(ONE)]
    assert supervisor.exited(ONE, -9, bound + 0.1) == [Terminate(CORE)]
    assert supervisor.next_deadline() == bound + STOP_S
    assert supervisor.tick(bound + STOP_S) == [Kill(CORE)]
    cause = f"the {ONE} had not ended 35 s after the signal and was killed"
    assert supervisor.exited(CORE, -9, bound + STOP_S) == [Finish(1, cause)]


def test_statuses_in_words() -> None:
    assert describe_status(3) == "ended with status 3"
    assert describe_status(-11) == "was killed by SIGSEGV"
    assert describe_status(-40) == "was killed by signal 40"
