"""Which samples a step trains on: a pure function of (seed, step), so that nothing needs to be handed over.

Sample number n of a run is element ``n % size`` of pass ``n // size``; each pass visits every sample once in an order
of its own. The order is a pseudorandom permutation computed per element (a four-round Feistel network with
cycle-walking, Luby and Rackoff 1988; Black and Rogaway 2002), so a dataset of any size needs no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.engine.randomness import seed_of

ROUNDS = 4


@dataclass(frozen=True)
class Cursor:
    """
    Args:
        size: samples in the dataset; it may be smaller than a global batch or not divide by it.
        global_batch: samples per step.
        microbatch: samples per microbatch; divides ``global_batch``.
        seed: the run's seed.
    """

    size: int
    global_batch: int
    microbatch: int
    seed: int

    def samples(self, step: int, microbatch: int) -> list[int]:
        """Dataset indices of one microbatch (0-based id) of the step that follows ``step`` committed ones."""
        first = step * self.global_batch + microbatch * self.microbatch
        return [self._shuffled(*divmod(n, self.size)) for n in range(first, first + self.microbatch)]

    def _shuffled(self, turn: int, position: int) -> int:
        half = max(1, ((self.size - 1).bit_length() + 1) // 2)
        mask = (1 << half) - 1
        while True:  # at most four times as many codes as samples: a handful of walks
            left, right = position >> half, position & mask
            for round_ in range(ROUNDS):
                left, right = right, left ^ (seed_of(self.seed, "order", turn, round_, right) & mask)
            position = (left << half) | right
            if position < self.size:
                return position
