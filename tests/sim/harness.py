"""Engine core and workers in one thread, over real frames, on the fake device: a schedule is a list of small moves.

`Sim` owns the core's half (the real Engine and Scheduler) and its ranks (`rank.py`); time stands still, the GPU's
streams run when a move says so.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from engine_core.device.fake import position_weights
from engine_core.engine import Engine
from engine_core.errors import EngineDead
from engine_core.ledger import Ledger
from engine_core.request import (
    Finish,
    Grammar,
    ModelLimits,
    Output,
    RawSampling,
    Request,
    prefix_chain,
    resolve,
)
from engine_core.scheduling.policy import Choice, FixedPolicy, Way
from engine_core.scheduling.scheduler import Scheduler
from engine_core.scheduling.step_model import Load, Observed
from engine_core.step import Lane
from tests.sim.executor import SimExecutor
from tests.sim.rank import CONTEXT, PAGE, PARTITIONS, SLOTS, VOCAB, DriverFaults, Rank

SHUT_DOWN = "shut down"
NOW = 0.0
EOS = 3


class TakingTurns:
    """A policy as changeable as `auto` can get: a small chunk mixed in, a batch on the lane with one partition, then
    with another, a large chunk, …"""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._asked = 0

    def choose(self, load: Load) -> Choice:
        if not load.rows:
            return Choice(self._budget, Way.ALONE)
        self._asked += 1
        lanes = (Choice(self._budget, Way.LANE, partition) for partition in range(PARTITIONS))
        ways = (Choice(3, Way.MIXED), *lanes, Choice(self._budget - load.rows, Way.MIXED))
        return ways[self._asked % len(ways)]

    def observe(self, observed: Observed) -> None:
        assert observed.load.rows or observed.tokens, "an empty step was observed"


class Sim:
    """One engine over `ranks` workers. `overlap`: off, stream, green, or auto, which takes turns."""

    def __init__(
        self,
        *,
        overlap: str = "off",
        depth: int = 2,
        pages: int = 40,
        budget: int = 24,
        prefix_caching: bool = True,
        ranks: int = 1,
        in_time: Sequence[bool] = (True,),
    ) -> None:
        self.faults = DriverFaults()
        self.ranks = [
            Rank(overlap=overlap, depth=depth, pages=pages, faults=self.faults, in_time=in_time) for _ in range(ranks)
        ]
        self.executor = SimExecutor(self.ranks)
        self.scheduler = Scheduler(
            max_num_seqs=SLOTS,
            max_num_batched_tokens=budget,
            page_size=PAGE,
            total_pages=pages,
            max_model_len=CONTEXT,
            max_queue=64,
            eos_token_ids=(EOS,),
            async_depth=depth,
            prefix_caching=prefix_caching,
            policy=TakingTurns(budget) if overlap == "auto" else FixedPolicy(budget, lane=overlap != "off"),
        )
        self.engine = Engine(self.scheduler, Ledger(), self.executor, self._publish)
        self.limits = ModelLimits(VOCAB, CONTEXT, PAGE, pages, (EOS,))
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.engine_dead: str | None = None

    @property
    def aborted(self) -> Rank | None:
        """The rank that aborted first, if any did."""
        return next((rank for rank in self.ranks if rank.abort_cause is not None), None)

    def _publish(self, outputs: list[Output]) -> None:
        for output in outputs:
            for number, token in zip(output.numbers.tolist(), output.tokens.tolist(), strict=True):
                assert number not in self.finishes, "a token came after the last word"
                self.tokens.setdefault(number, []).append(token)
            for finish in output.finishes:
                assert finish.number not in self.finishes, "two last words"
                self.finishes[finish.number] = finish

    # ---------------------------------------------------------------- moves

    def add(
        self,
        number: int,
        prompt: list[int],
        max_tokens: int,
        *,
        priority: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        n: int = 1,
        grammar: bool = False,
    ) -> None:
        """Submit a request that ends by length alone, unless it has stop ids; all n sequences draw the same tokens.

        With a `grammar` it ends by eos too. A dead engine takes none.
        """
        if self.engine_dead is not None:
            return
        ids = np.array(prompt, np.int32)
        raw = RawSampling(max_tokens=max_tokens, ignore_eos=True, stop_token_ids=stop_token_ids, n=n)
        for index in range(n):
            self.prompts[number + index] = tuple(prompt)
        self.engine.submit(
            Request(
                session=1,
                number=number,
                ids=ids,
                hashes=prefix_chain(ids, PAGE, None),
                salt=None,
                params=resolve(raw, len(prompt), self.limits, 7),
                priority=priority,
                grammar=Grammar("regex", "any") if grammar else None,
            ),
            NOW,
        )

    def step_engine(self) -> None:
        """One call of the engine; its death fails everything open, as the process around it does."""
        if self.engine_dead is not None:
            return
        try:
            self.engine.step(NOW)
        except EngineDead as error:
            self.engine_dead = str(error)
            self.engine.fail_all(str(error))

    def step_worker(self) -> None:
        for rank in self.ranks:
            rank.step()

    def masks_arrive(self) -> None:
        for rank in self.ranks:
            rank.masks.arrive()

    def run_stream(self, lane: Lane, count: int) -> None:
        for rank in self.ranks:
            rank.run_stream(lane, count)

    def turn(self, *, prefill: int = 99) -> None:
        """The engine, the workers, the primary lane and `prefill` operations of the other, the workers."""
        self.step_engine()
        self.step_worker()
        self.run_stream(Lane.PRIMARY, 99)
        self.run_stream(Lane.PREFILL, prefill)
        self.step_worker()

    def shut_down(self) -> None:
        """What the core does at its end: a last word for everybody, then the workers leave."""
        if self.engine_dead is None:
            self.engine_dead = SHUT_DOWN
            self.engine.fail_all(SHUT_DOWN)
        for rank in self.ranks:
            rank.shut_down()

    @property
    def settled(self) -> bool:
        return self.engine.open_count == 0 and not self.scheduler.in_flight.working

    def settle(self, limit: int = 600) -> None:
        """Turn until everything has its last word and nothing is in flight, or the engine is dead."""
        for _ in range(limit):
            self.step_engine()
            if self.engine_dead is not None or (self.settled and not len(self.scheduler.in_flight)):
                return
            self.step_worker()
            self.masks_arrive()
            for rank in self.ranks:
                rank.table.run_all()
            self.step_worker()
        raise AssertionError(f"{self.engine.open_count} sequences never ended")

    # --------------------------------------------------------------- truth

    def expected(self, number: int, count: int) -> list[int]:
        """What an uncontended row draws first."""
        return list(uncontended(self.prompts[number], count))

    def check_tokens(self) -> None:
        for number, tokens in self.tokens.items():
            assert tokens == self.expected(number, len(tokens)), f"request {number} drew other tokens"


@functools.cache
def uncontended(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """FakeCompute's arithmetic in plain Python, without pages, slots or lanes."""
    weights = _weights()
    drawn: list[int] = []
    total = sum((token + 1) * weights[position] for position, token in enumerate(prompt)) % 2**64
    for _ in range(count):
        drawn.append(_mix(total) % VOCAB)
        total = (total + (drawn[-1] + 1) * weights[len(prompt) + len(drawn) - 1]) % 2**64
    return tuple(drawn)


@functools.cache
def _weights() -> list[int]:
    return [int(weight) for weight in position_weights(CONTEXT)]


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)
