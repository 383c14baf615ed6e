"""Which engine core has seen the beginning of a prompt: remembered by whoever spreads requests over several.

Owns a bounded memory of prefixes, each with the core that got it last. It is a guess about their prefix caches, never a
promise: a wrong one costs a prefill.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from frontend.request import TextRequest

SHORTEST_TOKENS = 64
"""Shorter prefixes are cheap to compute anywhere."""
MAX_PREFIXES = 1 << 16
Key = bytes


def prefixes(request: TextRequest) -> list[Key]:
    """Keys of the prompt's prefixes of 64, 128, 256 … tokens, longest first; cache tenants never share one."""
    salt = "" if request.cache_salt is None else f"={request.cache_salt}"
    digest = hashlib.blake2b(salt.encode(), digest_size=16)
    out: list[Key] = []
    begin, end = 0, SHORTEST_TOKENS
    while end <= len(request.prompt_ids):
        digest.update(_packed(request.prompt_ids[begin:end]))
        out.append(digest.digest())
        begin, end = end, 2 * end
    return out[::-1]


def _packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, "<i4").tobytes()


class Affinity:
    """The core that got a prefix last, of the MAX_PREFIXES used most recently."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Key, int] = OrderedDict()

    def best(self, keys: Sequence[Key], among: Sequence[int]) -> int | None:
        """The one of these cores that has seen the longest prefix, if one has."""
        for key in keys:
            core = self._seen.get(key)
            if core is not None and core in among:
                return core
        return None

    def note(self, keys: Sequence[Key], core: int) -> None:
        """That core computes these prefixes now."""
        for key in keys:
            self._seen[key] = core
            self._seen.move_to_end(key)
        while len(self._seen) > MAX_PREFIXES:
            self._seen.popitem(last=False)

    def forget(self, core: int) -> None:
        """That core starts anew, with an empty cache."""
        self._seen = OrderedDict((key, other) for key, other in self._seen.items() if other != core)
