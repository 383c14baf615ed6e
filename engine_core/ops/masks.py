"""Masks: which ids of the vocabulary a row may draw, one bit each, as grammars give them and GPU kernels read them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MaskWords = npt.NDArray[np.uint32]
"""The lowest bit of the first word is id 0's; set: it may be drawn. Words beyond `mask_size` don't count."""


def mask_size(vocab_size: int) -> int:
    """Words of a mask that count."""
    return -(-vocab_size // 32)


def mask_words(ids: npt.NDArray[np.integer], vocab_size: int) -> MaskWords:
    """The mask that allows these ids."""
    allowed = np.zeros(32 * mask_size(vocab_size), np.bool_)
    allowed[ids] = True
    return np.packbits(allowed, bitorder="little").view("<u4")


def allowed_ids(words: MaskWords, vocab_size: int) -> npt.NDArray[np.bool_]:
    """[vocab_size] whether each id may be drawn."""
    return np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
