"""The best split for GPipe: the least (slowest forward + slowest backward) among the splits that fit in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from elastic.planning.profile import ModelProfile

Cuts = tuple[tuple[int, int], ...]


def gpipe_split(profile: ModelProfile, longest: Sequence[int], size: int) -> tuple[Cuts, int] | None:
    """``(cuts, max F + max B)`` in ticks, or None where no split into ``size`` stages fits.

    ``longest[s]`` ends the longest stage from layer s that fits in memory; every stage has the same number of
    microbatches in flight, so filling stages greedily decides whether a pair of limits can be met. As the limit on
    forwards grows, the least limit on backwards falls: two pointers visit all pairs that matter. Ties take the least
    forward.
    """
    forward, backward, count = profile.forward_prefix, profile.backward_prefix, len(profile)

    def split(limit_f: int, limit_b: int) -> Cuts | None:
        cuts, at = [], 0
        for behind in range(size - 1, -1, -1):
            stop = min(
                bisect_right(forward, forward[at] + limit_f) - 1,
                bisect_right(backward, backward[at] + limit_b) - 1,
                longest[at],
                count - behind,  # every stage behind needs a layer
            )
            if stop <= at:
                return None
            cuts.append((at, stop))
            at = stop
        return tuple(cuts) if at == count else None

    def limits(prefix: tuple[int, ...]) -> list[int]:
        return sorted({t - s for i, s in enumerate(prefix) for t in prefix[i + 1 :] if (t - s) * size >= prefix[-1]})

    best: tuple[Cuts, int] | None = None
    limits_b = limits(backward)
    for limit_f in limits(forward):
        while limits_b and (cuts := split(limit_f, limits_b[-1])) is not None:
            if best is None or limit_f + limits_b[-1] < best[1]:
                best = cuts, limit_f + limits_b[-1]
            limits_b.pop()
    return best
