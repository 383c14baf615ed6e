"""When a plan is launched that arrived while a batch is on the prefill lane: shortly before the step ahead of it ends.

Owns the estimate of that moment. A batch that completes meanwhile draws its first tokens ahead of the held plan, not
behind it: its prompts get them up to a whole step sooner, and decode loses nothing, since the primary lane is busy.
"""

from __future__ import annotations

from collections import deque

LEAD_S = 0.0015
"""Before the step ahead ends: enqueueing a step takes half a millisecond, and that the one before it was complete is
found about as late. A plan launched too late leaves the GPU idle, one launched too early only keeps a batch waiting."""


class Pace:
    """Learns what steps beside the batch in flight take."""

    def __init__(self) -> None:
        self._steps_s = deque[float](maxlen=2)

    def restart(self) -> None:
        """Another batch is in flight, perhaps beside another share of the SMs."""
        self._steps_s.clear()

    def took(self, seconds: float) -> None:
        """A step beside the batch, from the end of the one before it to its own."""
        self._steps_s.append(seconds)

    def due(self, since: float, steps: int) -> float:
        """When to launch behind so many steps of which the first began at `since`: then, if none was seen yet."""
        return since + steps * min(self._steps_s) - LEAD_S if self._steps_s else since
