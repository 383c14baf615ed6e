"""Draws tokens: sampling parameters by slot, applied to the logits of whatever rows a step samples.

Owns the order of the parameters (that of `RowSampling`) and the choice of the cheapest exact way to draw. A draw is a
Gumbel maximum: the token with the largest logit + noise, where the noise depends on (seed, position, token) alone. So
the token depends on the row's own logits, seed and position, never on the batch around it.

What the filters mean is in `ops/filters.py`, the noise in `ops/philox.py`, the logprobs in `logprobs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_core.ops.filters import Filters, cutoff
from engine_core.ops.masks import allowed_ids
from engine_core.ops.philox import PRUNE, Words, noise_for, noise_for_all
from engine_core.step import LogprobBlock, PromptLogprobBlock, RowSampling
from engine_core.worker.logprobs import Described, describe, describe_prompt
from engine_core.worker.penalties import Penalties, SeenTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.device.base import PromptRows, RowMask

Int32 = npt.NDArray[np.int32]

CANDIDATES = 256
"""Largest logits that the filters look at first; a row for which they don't settle the matter is sorted whole."""
SMALLEST_DIVISOR = 1e-30
"""Temperatures and repetition penalties below it act like it, so that no quotient of logits overflows."""


class NonFiniteLogits(ArithmeticError):
    """The model produced NaN or infinite logits; the message names the slots."""


class Head(Protocol):
    """The part of a model that turns hidden states into logits."""

    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of R rows."""

    tokens: Tensor
    """[R] int32"""
    logprobs: LogprobBlock | None
    """Of the rows that asked for them."""


class Sampler:
    """Sampling state of every slot, on the device of the logits."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._prompt_len = np.zeros(slots, np.int64)
        self._temperature = np.zeros(slots, np.float32)
        self._top_k = np.zeros(slots, np.int64)
        self._top_p = np.ones(slots, np.float32)
        self._min_p = np.zeros(slots, np.float32)
        self._seed = np.zeros(slots, np.uint64)
        self._min_tokens = np.zeros(slots, np.int64)
        self._logprobs = np.full(slots, -1, np.int64)
        self._changed = np.zeros(slots, np.bool_)
        """The row's logits are changed before the temperature: suppressed ids, bias or penalties."""
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._suppress: dict[int, Tensor] = {}
        self._seen: dict[int, SeenTokens] = {}
        """Of the rows that use a penalty."""

    def set_row(self, slot: int, sampling: RowSampling, prompt_len: int, ids: Int32) -> None:
        """A row starts in `slot`; `ids` are all known so far, those from `prompt_len` on being earlier output."""
        self._prompt_len[slot] = prompt_len
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = sampling.seed
        self._logprobs[slot] = sampling.logprobs
        self._set_bias(slot, sampling.logit_bias)
        self._set_suppressed(slot, sampling.suppress, sampling.min_tokens)
        self._set_penalties(slot, sampling, ids[:prompt_len], ids[prompt_len:])
        self._changed[slot] = slot in self._seen or slot in self._bias or slot in self._suppress

    def _set_bias(self, slot: int, bias: dict[int, float]) -> None:
        self._bias.pop(slot, None)
        if bias:
            ids = torch.tensor(list(bias.keys()), device=self._device)
            self._bias[slot] = ids, torch.tensor(list(bias.values()), dtype=torch.float32, device=self._device)

    def _set_suppressed(self, slot: int, suppress: bytes, min_tokens: int) -> None:
        self._suppress.pop(slot, None)
        self._min_tokens[slot] = min_tokens
        if suppress and min_tokens > 0:
            ids = np.frombuffer(suppress, "<i4").astype(np.int64)
            self._suppress[slot] = torch.from_numpy(ids).to(self._device)

    def _set_penalties(self, slot: int, sampling: RowSampling, prompt: Int32, output: Int32) -> None:
        self._seen.pop(slot, None)
        penalties = Penalties(
            max(sampling.repetition_penalty, SMALLEST_DIVISOR), sampling.presence_penalty, sampling.frequency_penalty
        )
        if penalties != Penalties(1.0, 0.0, 0.0):
            self._seen[slot] = SeenTokens(prompt, output, penalties)

    @torch.inference_mode()
    def sample(self, logits: Tensor, slots: Int32, positions: Int32, masks: Sequence[RowMask] = ()) -> Sampled:
        """One token for each row of raw logits [R, V] (float32, left unchanged).

        Row r belongs to slots[r]; positions[r] is the index in prompt + output of the token being drawn. Penalty counts
        advance by the tokens drawn; rows with a mask draw what it allows. Raises NonFiniteLogits, before any state
        changes.
        """
        largest, tokens = logits.max(dim=1)
        self._check_finite(largest, slots)
        altered = self._changed[slots]
        altered[[mask.row for mask in masks]] = True
        changed = np.flatnonzero(altered)
        random = np.flatnonzero(self._temperature[slots])
        final = logits
        if len(changed):
            final = self._change(logits, changed, slots, positions)
            for mask in masks:
                allowed = torch.from_numpy(allowed_ids(mask.words, self._vocab_size)).to(self._device)
                final[mask.row, ~allowed] = -torch.inf
            tokens = final.argmax(dim=1)
        if len(random):
            rows = self._index(random)
            tokens[rows] = self._draw(final[rows], slots[random], positions[random])
        for row in changed.tolist():
            if seen := self._seen.get(int(slots[row])):
                seen.add(int(tokens[row]))
        return Sampled(tokens.int(), self._describe(logits, tokens, slots))

    def prompt_logprobs(self, model: Head, hidden: Tensor, rows: PromptRows) -> PromptLogprobBlock:
        """Logprobs of the prompt tokens that follow hidden states [L, H], in blocks of bounded memory."""
        targets = self._index(rows.targets)
        described = describe_prompt(model.logits, hidden, targets, rows.top, self._vocab_size)
        return PromptLogprobBlock(
            slot=rows.slot,
            start=rows.start + 1,
            logprobs=_packed(described.logprobs),
            ranks=_packed(described.ranks),
            top=described.top_ids.shape[1],
            top_ids=_packed(described.top_ids),
            top_logprobs=_packed(described.top_logprobs),
        )

    def _index(self, values: npt.NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def _column(self, values: npt.NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _check_finite(self, largest: Tensor, slots: Int32) -> None:
        """A NaN or +inf anywhere in a row, or -inf everywhere, shows in its maximum."""
        finite = largest.isfinite()
        if not bool(finite.all()):
            bad = slots[~finite.cpu().numpy()].tolist()
            raise NonFiniteLogits(f"the model's logits are not finite for the rows in slots {bad}")

    # ------------------------------ before the temperature

    def _change(self, logits: Tensor, rows: npt.NDArray[np.intp], slots: Int32, positions: Int32) -> Tensor:
        """A copy of the logits in which these rows are suppressed, biased and penalized, in this order."""
        final = logits.clone()
        for row in rows.tolist():
            slot = int(slots[row])
            if slot in self._suppress and positions[row] - self._prompt_len[slot] < self._min_tokens[slot]:
                final[row, self._suppress[slot]] = -torch.inf
            if slot in self._bias:
                ids, bias = self._bias[slot]
                final[row, ids] += bias
            if slot in self._seen:
                self._seen[slot].penalize(final[row])
        return final

    # ------------------------------ drawing

    def _draw(self, logits: Tensor, slots: Int32, positions: Int32) -> Tensor:
        """Tokens [R] of rows whose temperature is above 0."""
        temperature = self._column(np.maximum(self._temperature[slots], np.float32(SMALLEST_DIVISOR)))
        # Shifting first keeps tiny temperatures from overflowing. (A row in which all is suppressed becomes NaN: then
        # nothing passes a limit, and its lowest candidate is taken.)
        scaled = (logits - logits.amax(dim=1, keepdim=True)) / temperature[:, None]
        seeds, at = self._seed[slots], positions.astype(np.uint64)
        tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        narrow = (self._top_k[slots] > 0) | (self._top_p[slots] < 1)
        for rows, draw in ((np.flatnonzero(narrow), self._draw_narrow), (np.flatnonzero(~narrow), self._draw_wide)):
            if len(rows):
                index = self._index(rows)
                filters = self._filters(slots[rows])
                tokens[index] = draw(scaled[index], filters, seeds[rows], at[rows])
        return tokens

    def _filters(self, slots: Int32) -> Filters:
        return Filters(
            self._index(self._top_k[slots]), self._column(self._top_p[slots]), self._column(self._min_p[slots])
        )

    def _draw_narrow(self, scaled: Tensor, filters: Filters, seeds: Words, at: Words) -> Tensor:
        """Rows with top_k or top_p: their largest candidates first, the whole row only where these don't settle it."""
        # By way of softmax, which sums a row in one order whatever the batch (a plain sum doesn't).
        total = scaled.softmax(dim=1).amax(dim=1).reciprocal()
        values, ids = scaled.topk(min(CANDIDATES, scaled.shape[1]), dim=1)
        limit = cutoff(values, filters, total)
        tokens = _pick(values, ids, limit, seeds, at)
        if values.shape[1] < scaled.shape[1]:
            open_rows = torch.nonzero(values[:, -1] >= limit.clamp(min=-PRUNE))[:, 0]
            if len(open_rows):
                rows = open_rows.cpu().numpy()
                values, ids = scaled[open_rows].sort(dim=1, descending=True)
                limit = cutoff(values, filters.rows(open_rows), total[open_rows])
                tokens[open_rows] = _pick(values, ids, limit, seeds[rows], at[rows])
        return tokens

    def _draw_wide(self, scaled: Tensor, filters: Filters, seeds: Words, at: Words) -> Tensor:
        """Rows that min_p alone may filter: the limit is known without sorting."""
        limit = filters.min_p.log().clamp_(min=-PRUNE)[:, None]
        kept = scaled >= limit
        if int(kept.sum()) * 4 < kept.numel():
            rows, ids = torch.nonzero(kept, as_tuple=True)
            scores = torch.full_like(scaled, -torch.inf)
            scores[rows, ids] = scaled[rows, ids] + _noise(rows, ids, seeds, at)
        else:
            noise = noise_for_all(seeds, at, scaled.shape[1]).to(self._device)
            scores = torch.where(kept, scaled + noise, -torch.inf)
        return scores.argmax(dim=1)

    # ------------------------------ logprobs

    def _describe(self, logits: Tensor, tokens: Tensor, slots: Int32) -> LogprobBlock | None:
        wanted = self._logprobs[slots]
        rows = np.flatnonzero(wanted >= 0)
        if len(rows) == 0:
            return None
        index = self._index(rows)
        described = describe(logits[index], tokens[index], int(wanted.max()))
        counts = np.minimum(wanted[rows], described.top_ids.shape[1])
        return _block(rows, counts, described)


def _noise(rows: Tensor, ids: Tensor, seeds: Words, at: Words) -> Tensor:
    """Noise [N] of candidates `ids` [N] of `rows` [N]."""
    owners = rows.cpu().numpy()
    return noise_for(seeds[owners], at[owners], ids.cpu().numpy().astype(np.uint64)).to(rows.device)


def _pick(values: Tensor, ids: Tensor, limit: Tensor, seeds: Words, at: Words) -> Tensor:
    """The candidate [R] of largest noisy logit among those [R, K] at or above the limit; of equals the lowest id."""
    kept = values >= limit.clamp(min=-PRUNE)[:, None]
    rows, columns = torch.nonzero(kept, as_tuple=True)
    scores = torch.full_like(values, -torch.inf)
    scores[rows, columns] = values[rows, columns] + _noise(rows, ids[rows, columns], seeds, at)
    best = scores == scores.amax(dim=1, keepdim=True)
    return torch.where(best, ids, torch.iinfo(torch.int64).max).amin(dim=1)


def _block(rows: npt.NDArray[np.intp], counts: npt.NDArray[np.int64], described: Described) -> LogprobBlock:
    """Columns of the wire; each row's alternatives are cut to the number that it asked for."""
    wanted = np.arange(described.top_ids.shape[1])[None, :] < counts[:, None]
    return LogprobBlock(
        rows=rows.astype("<u4").tobytes(),
        sampled=_packed(described.logprobs),
        ranks=_packed(described.ranks),
        counts=counts.astype("<u4").tobytes(),
        top_ids=described.top_ids.cpu().numpy()[wanted].astype("<i4").tobytes(),
        top_logprobs=described.top_logprobs.cpu().numpy()[wanted].astype("<f4").tobytes(),
    )


def _packed(values: Tensor) -> bytes:
    """Little-endian int32 or float32 bytes."""
    return values.contiguous().cpu().numpy().tobytes()
