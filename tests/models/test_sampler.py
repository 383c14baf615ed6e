"""What each sampling parameter does to the distribution that tokens are drawn from, and on what a draw depends."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine_core.device.base import RowMask
from engine_core.ops import reference
from engine_core.ops.masks import mask_words
from engine_core.step import RowSampling
from engine_core.worker import sampler as sampler_module
from engine_core.worker.sampler import NonFiniteLogits, Sampler

Ids = npt.NDArray[np.int32]
VOCAB = 12
SMALL = torch.tensor([[2.0, 1.5, 1.5, 0.9, 0.0, -0.4, -1.0, -1.0, -2.0, 0.3, -3.0, 1.1]])
PROMPT, OUTPUT = [1, 3, 3], [0, 2, 0]
DRAWS = 8_000


def ids_of(*tokens: int) -> Ids:
    return np.array(tokens, np.int32)


def pack(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def new_sampler(
    *rows: RowSampling, vocab: int = VOCAB, prompt: list[int] = PROMPT, output: list[int] = OUTPUT
) -> Sampler:
    """A sampler with one row a slot, all over the same ids."""
    sampler = Sampler(max(1, len(rows)), vocab, torch.device("cpu"))
    for slot, row in enumerate(rows):
        sampler.set_row(slot, row, len(prompt), ids_of(*prompt, *output))
    return sampler


def draw(sampler: Sampler, logits: torch.Tensor, position: int = len(PROMPT + OUTPUT)) -> list[int]:
    """The next token of every slot, all at the same position."""
    slots = np.arange(len(logits), dtype=np.int32)
    return sampler.sample(logits, slots, np.full_like(slots, position)).tokens.tolist()


def one(sampler: Sampler, logits: torch.Tensor, position: int = len(PROMPT + OUTPUT), slot: int = 0) -> int:
    return int(sampler.sample(logits, ids_of(slot), ids_of(position)).tokens[0])


def probabilities(row: RowSampling, logits: torch.Tensor = SMALL) -> npt.NDArray[np.float64]:
    """Of one draw after PROMPT and OUTPUT, by the definition."""
    changed = reference.penalized(
        logits[0].double().numpy(),
        prompt=PROMPT,
        output=OUTPUT,
        suppress=np.frombuffer(row.suppress, "<i4").tolist(),
        min_tokens=row.min_tokens,
        logit_bias=row.logit_bias,
        repetition_penalty=row.repetition_penalty,
        presence_penalty=row.presence_penalty,
        frequency_penalty=row.frequency_penalty,
    )
    if row.temperature == 0:
        return np.asarray(np.arange(len(changed)) == changed.argmax(), np.float64)
    return reference.filtered(changed, row.temperature, row.top_k, row.top_p, row.min_p)


PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.4},
    "top_k": {"top_k": 4},
    "top_k cuts between equals": {"top_k": 2},
    "top_k 1": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.7},
    "top_p cuts between equals": {"top_p": 0.5},
    "top_p that one token reaches": {"top_p": 1e-6},
    "min_p": {"min_p": 0.2},
    "min_p 1": {"min_p": 1.0},
    "all filters": {"top_k": 7, "top_p": 0.9, "min_p": 0.15, "temperature": 1.3},
    "top_p renormalizes after top_k": {"top_k": 5, "top_p": 0.75},
    "bias": {"logit_bias": {4: 2.0, 0: -1.5}},
    "suppressed": {"suppress": pack(0, 9), "min_tokens": 4},
    "no longer suppressed": {"suppress": pack(0, 9), "min_tokens": 3},
    "bias doesn't lift suppression": {"suppress": pack(0), "min_tokens": 9, "logit_bias": {0: 100.0}},
    "repetition": {"repetition_penalty": 1.8},
    "repetition rewarded": {"repetition_penalty": 0.5},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": 0.7},
    "everything": {
        "temperature": 1.4,
        "top_k": 9,
        "top_p": 0.95,
        "min_p": 0.05,
        "logit_bias": {7: 1.0, 10: 2.0},
        "suppress": pack(5),
        "min_tokens": 4,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
    },
}


def assert_drawn_from(expected: npt.NDArray[np.float64], tokens: list[int]) -> None:
    """Pearson's statistic lies within its mean plus five deviations, and nothing impossible was drawn."""
    counts = np.bincount(tokens, minlength=len(expected))
    possible = expected > 0
    assert counts[~possible].sum() == 0, "a token was drawn that the parameters exclude"
    wanted = expected[possible] * len(tokens)
    statistic = float(((counts[possible] - wanted) ** 2 / wanted).sum())
    freedom = int(possible.sum()) - 1
    assert statistic <= freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("name", PARAMETERS)
def test_distribution(name: str) -> None:
    """Red when a parameter is dropped, means something else, or is applied in another order: 8,000 seeds against the
    definition."""
    row = RowSampling(**PARAMETERS[name])
    sampler = new_sampler(*(RowSampling(**PARAMETERS[name], seed=seed) for seed in range(DRAWS)))
    assert_drawn_from(probabilities(row), draw(sampler, SMALL.expand(DRAWS, VOCAB)))


@pytest.mark.parametrize("candidates", [3, 256])
def test_distribution_over_positions(candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when positions of one sequence share noise: single draws and pairs of successive ones are as independent as
    they should be, also where the first candidates don't settle a row."""
    monkeypatch.setattr(sampler_module, "CANDIDATES", candidates)
    row = RowSampling(top_p=0.9, seed=2**64 - 1)
    positions = np.arange(DRAWS, dtype=np.int32)
    slots = np.zeros(DRAWS, np.int32)
    tokens = new_sampler(row).sample(SMALL.expand(DRAWS, VOCAB), slots, positions).tokens.numpy()
    expected = probabilities(row)
    assert_drawn_from(expected, tokens.tolist())
    pairs = tokens[:-1].astype(np.int64) * VOCAB + tokens[1:]
    assert_drawn_from(np.outer(expected, expected).reshape(-1), pairs[::2].tolist())


# ------------------------------ what a draw depends on

MIXED = [
    RowSampling(temperature=0),
    RowSampling(seed=1),
    RowSampling(seed=1, top_k=20),
    RowSampling(seed=2**63, top_p=0.8),
    RowSampling(seed=5, min_p=0.1, logprobs=2),
    RowSampling(seed=6, top_p=0.999, temperature=3.0),
    RowSampling(seed=7, repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.2),
    RowSampling(temperature=0, logit_bias={5: 50.0}, suppress=pack(5), min_tokens=2),
    RowSampling(seed=8, temperature=1e-3),
]


def wide_logits(rows: int, vocab: int = 700) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3))


def test_draws_do_not_depend_on_the_batch() -> None:
    """Red when a row's token changes with the rows beside it, their order or their number."""
    logits = wide_logits(len(MIXED))
    together = draw(new_sampler(*MIXED, vocab=700), logits)
    alone = [one(new_sampler(*MIXED, vocab=700), logits[slot : slot + 1], slot=slot) for slot in range(len(MIXED))]
    assert together == alone
    order = np.random.default_rng(1).permutation(len(MIXED)).astype(np.int32)
    shuffled = new_sampler(*MIXED, vocab=700).sample(logits[order], order, np.full_like(order, 6)).tokens.tolist()
    assert shuffled == [together[slot] for slot in order.tolist()]


def test_draws_do_not_depend_on_the_way_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the candidates looked at first, or the noise made for survivors only, change a token."""
    logits = wide_logits(len(MIXED))
    expected = draw(new_sampler(*MIXED, vocab=700), logits)
    for candidates in (1, 2, 5, 50, 700):
        monkeypatch.setattr(sampler_module, "CANDIDATES", candidates)
        assert draw(new_sampler(*MIXED, vocab=700), logits) == expected
    monkeypatch.setattr(sampler_module, "PRUNE", math.inf)
    assert draw(new_sampler(*MIXED, vocab=700), logits) == expected


def test_draws_follow_the_definition() -> None:
    """Red when the draw isn't the candidate of largest logit + noise (seed, position, candidate)."""
    rows = [RowSampling(seed=seed, temperature=0.7, top_k=30) for seed in (0, 3, 2**40, 2**64 - 1)]
    logits = wide_logits(4)
    for position in (6, 7, 2_000_000):
        for slot, token in enumerate(draw(new_sampler(*rows, vocab=700), logits, position)):
            kept = reference.filtered(logits[slot].double().numpy(), 0.7, 30)
            noise = np.array([reference.candidate_noise(rows[slot].seed, position, i) for i in range(700)])
            with np.errstate(divide="ignore"):
                assert token == int((np.log(kept) + noise).argmax())


def test_a_preempted_row_draws_the_same() -> None:
    """Red when earlier output that comes back with a restarted row counts as prompt, or is forgotten."""
    row = RowSampling(
        seed=3,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        suppress=pack(0, 1, 2),
        min_tokens=5,
    )
    logits = [wide_logits(1, VOCAB) + step for step in range(8)]

    def run(interrupted_at: int | None) -> list[int]:
        sampler, known = Sampler(1, VOCAB, torch.device("cpu")), list(PROMPT)
        sampler.set_row(0, row, 3, ids_of(*known))
        for step in range(8):
            if step == interrupted_at:
                sampler.set_row(0, RowSampling(frequency_penalty=2.0), 1, ids_of(4))  # somebody else's row
                sampler.set_row(0, row, 3, ids_of(*known))
            known.append(one(sampler, logits[step], len(known)))
        return known

    assert all(run(at) == run(None) for at in (1, 4, 7))


# ------------------------------ what single parameters mean


def test_greedy_takes_the_lowest_of_equals() -> None:
    """Red when ties depend on the kernel."""
    logits = torch.zeros(3, 50_000)
    logits[1, [700, 40_000]] = 1.0
    logits[2, 49_999] = 1.0
    rows = [RowSampling(temperature=0)] * 3
    assert draw(new_sampler(*rows, vocab=50_000), logits) == [0, 700, 49_999]


def test_greedy_ignores_the_filters() -> None:
    """Red when top_k, top_p, min_p or a seed make a greedy row random."""
    row = RowSampling(temperature=0, top_k=5, top_p=0.9, min_p=0.1, seed=4)
    assert draw(new_sampler(*[row] * 50), SMALL.expand(50, VOCAB)) == [0] * 50


def test_suppressed_until_min_tokens() -> None:
    """Red when stop ids can be drawn before min_tokens, or still can't at min_tokens (counted in output tokens)."""
    row = RowSampling(temperature=0, suppress=pack(0, 1), min_tokens=2)
    sampler = new_sampler(row, output=[])
    assert [one(sampler, SMALL, position) for position in (3, 4, 5)] == [2, 2, 0]


def test_counts_advance_with_the_draws() -> None:
    """Red when a drawn token isn't penalized in the very next draw, or a discarded row's counts outlive it."""
    row = RowSampling(temperature=0, presence_penalty=1.0)
    logits = torch.tensor([[1.0, 0.9, 0.8, 0.7]])
    sampler = new_sampler(row, vocab=4, prompt=[0], output=[])
    assert [one(sampler, logits, position) for position in range(1, 6)] == [0, 1, 2, 3, 0]
    sampler.set_row(0, row, 1, ids_of(0))
    assert [one(sampler, logits, position) for position in range(1, 4)] == [0, 1, 2]
    sampler.set_row(0, RowSampling(temperature=0), 1, ids_of(0))
    assert [one(sampler, logits, position) for position in range(1, 4)] == [0, 0, 0]


def test_frequency_grows_and_presence_does_not() -> None:
    """Red when the two penalties are exchanged."""
    logits = torch.tensor([[1.0, 0.0]])
    frequency = new_sampler(RowSampling(temperature=0, frequency_penalty=0.4), vocab=2, prompt=[1], output=[0, 0])
    presence = new_sampler(RowSampling(temperature=0, presence_penalty=0.4), vocab=2, prompt=[1], output=[0, 0])
    assert [one(frequency, logits, position) for position in (3, 4)] == [0, 1]
    assert [one(presence, logits, position) for position in range(3, 13)] == [0] * 10


def test_repetition_counts_the_prompt_and_shrinks_either_sign() -> None:
    """Red when the prompt is left out of the repetition penalty, or a negative logit is divided (and so grows)."""
    row = RowSampling(temperature=0, repetition_penalty=2.0)
    assert one(new_sampler(row, vocab=3, prompt=[0], output=[]), torch.tensor([[1.0, 0.6, 0.1]]), 1) == 1
    assert one(new_sampler(row, vocab=3, prompt=[0], output=[]), torch.tensor([[-1.0, -1.5, -3.0]]), 1) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 100.0, "temperature": 1e-300},
        {"temperature": 1e-45},
        {"temperature": 100.0, "top_p": 1e-300},
        {"top_k": 2**31 - 1, "top_p": 1 - 1e-12},
        {"logit_bias": {0: -100.0, 1: 100.0}, "temperature": 1e-20, "repetition_penalty": 1e-30},
        {"suppress": pack(*range(VOCAB)), "min_tokens": 100},
        {"suppress": pack(*range(VOCAB)), "min_tokens": 100, "top_k": 3, "repetition_penalty": 1e-40},
        {"suppress": pack(*range(VOCAB)), "min_tokens": 100, "temperature": 0, "logit_bias": {3: 9.0}},
    ],
)
def test_extreme_values_draw_an_id_and_harm_nobody(changes: dict[str, Any]) -> None:
    """Red when a quotient overflows to inf or NaN: then ids outside the vocabulary come out, or the batch fails."""
    neighbour = RowSampling(temperature=0)
    tokens = draw(new_sampler(RowSampling(**changes), neighbour), SMALL.expand(2, VOCAB))
    assert 0 <= tokens[0] < VOCAB
    assert tokens[1] == 0


def test_tiny_temperatures_are_greedy() -> None:
    """Red when dividing by a tiny temperature loses the largest logit."""
    rows = [RowSampling(temperature=value, seed=seed) for seed, value in enumerate((1e-5, 1e-20, 1e-300))]
    assert draw(new_sampler(*rows), SMALL.expand(3, VOCAB)) == [0, 0, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("row", [RowSampling(temperature=0), RowSampling(), RowSampling(presence_penalty=0.5)])
def test_non_finite_logits_fail_and_change_nothing(value: float, row: RowSampling) -> None:
    """Red when NaN logits become tokens, or the failure doesn't name its rows."""
    sampler = new_sampler(row, row, row)
    logits = SMALL.repeat(3, 1)
    before = draw(new_sampler(row, row, row), logits)
    logits[1, 7] = value
    with pytest.raises(NonFiniteLogits, match=r"slots \[1\]"):
        draw(sampler, logits)
    logits[1, 7] = SMALL[0, 7]
    assert draw(sampler, logits) == before


def test_logits_are_left_unchanged() -> None:
    """Red when a penalty is written into the caller's logits, from which logprobs are taken."""
    logits = SMALL.clone()
    one(new_sampler(RowSampling(logit_bias={1: 5.0}, suppress=pack(0), min_tokens=9, presence_penalty=1.0)), logits)
    assert torch.equal(logits, SMALL)


# ------------------------------ masks


@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS.keys())
def test_a_masked_row_draws_from_what_its_mask_leaves(parameters: dict[str, Any]) -> None:
    """Red when a masked token is drawn, a row beside it draws another token than without, or logprobs feel the mask."""
    rows = [RowSampling(**{"seed": 3, **parameters}, logprobs=2), RowSampling(**{"seed": 4, **parameters}, logprobs=2)]
    free, bound = new_sampler(*rows), new_sampler(*rows)
    logits = SMALL.repeat(2, 1)
    words = mask_words(np.array([5, 8, 10]), VOCAB)
    slots = ids_of(0, 1)
    seen = set()
    for position in range(6, 60):
        without = free.sample(logits, slots, ids_of(position, position))
        masked = bound.sample(logits, slots, ids_of(position, position), [RowMask(1, words)])
        assert masked.tokens[0] == without.tokens[0]
        seen.add(int(masked.tokens[1]))
        assert masked.logprobs is not None
        assert without.logprobs is not None
        assert masked.logprobs.top_logprobs == without.logprobs.top_logprobs
        assert torch.equal(logits, SMALL.repeat(2, 1))
    assert seen <= {5, 8, 10}
