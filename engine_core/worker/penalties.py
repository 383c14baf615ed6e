"""Which tokens a row has seen, for the penalties: counts on the device, updated without asking the host.

Owns memory for the rows that use a penalty, and for no others: five bytes a vocabulary entry and row.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TokenCounts:
    """By slot: which ids occur in prompt or output, and how often in the output."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._seen = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._line: dict[int, int] = {}
        """Slot to line of the two tables."""
        self._free: list[int] = []

    def start(self, slot: int, prompt: Tensor, output: Tensor) -> None:
        """Count a row's ids (int64) from nothing."""
        if slot not in self._line:
            if not self._free:
                self._grow()
            self._line[slot] = self._free.pop()
        line = self._line[slot]
        self._seen[line] = False
        self._seen[line, prompt] = True
        self._seen[line, output] = True
        self._counts[line] = 0
        self._counts[line].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def drop(self, slot: int) -> None:
        """The slot's row uses no penalty (any more)."""
        line = self._line.pop(slot, None)
        if line is not None:
            self._free.append(line)

    def _grow(self) -> None:
        """Double the tables."""
        old = len(self._seen)
        new = max(4, 2 * old)
        self._seen = torch.cat((self._seen, self._seen.new_zeros((new - old, self._seen.shape[1]))))
        self._counts = torch.cat((self._counts, self._counts.new_zeros((new - old, self._counts.shape[1]))))
        self._free.extend(reversed(range(old, new)))

    def lines(self, slots: list[int]) -> Tensor:
        """The lines of these slots' rows, all of which were started."""
        return torch.tensor([self._line[slot] for slot in slots], device=self._seen.device)

    def add(self, lines: Tensor, tokens: Tensor) -> None:
        """Each row has drawn one more token (int64)."""
        self._seen[lines, tokens] = True
        self._counts[lines, tokens] += 1

    def penalize(
        self, logits: Tensor, lines: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
    ) -> Tensor:
        """Logits [R, V] under each row's penalties [R]: repetition first, then presence and frequency."""
        repeated = torch.where(logits > 0, logits / repetition[:, None], logits * repetition[:, None])
        logits = torch.where(self._seen[lines], repeated, logits)
        counts = self._counts[lines]
        return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)
