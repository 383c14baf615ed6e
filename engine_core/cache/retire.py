"""How anything that launched work may touch goes back: after every lane that may touch it is proven done.

Owns the fences. `retire(resource, after={lane: last submitted sequence})` is the one way in; a resource comes out when
each lane's proof has reached its fence, never because a result was applied (OWNERSHIP rule O12).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from engine_core.step import Lane

T = TypeVar("T")


class RetireQueue(Generic[T]):
    """Resources between their release and the proof that no lane touches them any more."""

    def __init__(self) -> None:
        self._proven = dict.fromkeys(Lane, 0)
        self._waiting: list[tuple[dict[Lane, int], T]] = []

    def retire(self, resource: T, after: Mapping[Lane, int]) -> list[T]:
        """Fence a resource; returns it at once, in a list, when its lanes have been proven already."""
        fence = {lane: sequence for lane, sequence in after.items() if sequence > self._proven[lane]}
        if not fence:
            return [resource]
        self._waiting.append((fence, resource))
        return []

    def complete(self, proof: Mapping[Lane, int]) -> list[T]:
        """Take over newer proofs (lane → proven sequence); returns what they set free, in the order of retirement."""
        for lane, sequence in proof.items():
            self._proven[lane] = max(self._proven[lane], sequence)
        if not self._waiting:
            return []
        proven = self._proven
        free = [resource for fence, resource in self._waiting if _passed(fence, proven)]
        self._waiting = [entry for entry in self._waiting if not _passed(entry[0], proven)]
        return free


def _passed(fence: Mapping[Lane, int], proven: Mapping[Lane, int]) -> bool:
    return all(sequence <= proven[lane] for lane, sequence in fence.items())
