"""The tokens that a row has seen, and what the penalties do to their logits.

Owns the counts of rows that use a penalty. A step costs as much as the row has different tokens, whatever the size of
the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Of one row; 1, 0 and 0 change nothing."""

    repetition: float
    presence: float
    frequency: float


class SeenTokens:
    """The different tokens of a row's prompt and output, each with its number of occurrences in the output."""

    def __init__(self, prompt: npt.NDArray[np.int32], output: npt.NDArray[np.int32], penalties: Penalties) -> None:
        known = np.unique(np.concatenate((prompt, output)))
        self._ids = known.astype(np.int64)
        self._counts = np.zeros(len(known), np.float32)
        np.add.at(self._counts, np.searchsorted(known, output), 1)
        self._place = {int(token): place for place, token in enumerate(known)}
        self._penalties = penalties

    def add(self, token: int) -> None:
        """The row has drawn this token."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.full(place + 1, token)))
            self._counts = np.concatenate((self._counts, np.zeros(place + 1, np.float32)))
        self._ids[place] = token
        self._counts[place] += 1

    def penalize(self, logits: Tensor) -> None:
        """Change a row's logits [V] in place: repetition first, then presence and frequency."""
        size = len(self._place)
        ids = torch.from_numpy(self._ids[:size]).to(logits.device)
        counts = torch.from_numpy(self._counts[:size]).to(logits.device)
        known = logits[ids]
        known = torch.where(known > 0, known / self._penalties.repetition, known * self._penalties.repetition)
        logits[ids] = known - self._penalties.frequency * counts - self._penalties.presence * (counts > 0)
