"""Twenty prompts, and the comparison of greedy output with transformers.

Greedy decoding is checked by teacher forcing: one forward of transformers over prompt and output tells, at every
position, which token it would have chosen and by how much. Within `TIE` of the best, float32 sums in another order may
choose either token; anything else is a difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

TIE = 1e-4

PROMPTS = (
    "The capital of France is",
    "Q: What is 17 + 25?\nA:",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived",
    "The three laws of motion are:\n1.",
    "Translate to Spanish: Good morning, my friend.\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Water boils at 100 degrees Celsius because",
    "<html>\n<head>\n<title>",
    "The year 1969 is remembered for",
    "A list of fruits: apple, banana,",
    "Photosynthesis is the process by which",
    "“To be, or not to be”, said",
    "In 2024, 12345 people visited 678 places in 9 days, so",
    "SELECT name, age FROM users WHERE",
    "The opposite of hot is cold. The opposite of tall is",
    "Grüße aus Köln! 東京は",
    "Recipe for pancakes\n\nIngredients:\n-",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness,",
)


@dataclass(frozen=True)
class Step:
    """A position at which transformers would have chosen another token."""

    position: int
    """Index in the output."""
    served: int
    chosen: int
    margin: float
    """Logit of `chosen` minus logit of `served`."""

    @property
    def tie(self) -> bool:
        return self.margin <= TIE


def other_choices(model: PreTrainedModel, prompt: list[int], output: list[int]) -> list[Step]:
    """Every position of the output where transformers' best token is not the one served."""
    ids = torch.tensor([[*prompt, *output]])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    best = logits.argmax(-1)
    served = torch.tensor(output)
    margins = logits.gather(1, best[:, None])[:, 0] - logits.gather(1, served[:, None])[:, 0]
    return [
        Step(i, int(served[i]), int(best[i]), float(margins[i])) for i in torch.nonzero(best != served)[:, 0].tolist()
    ]
