"""The knapsack behind a composition: do so many devices, cut into pipelines, get through so many microbatches?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

# Table cells times sizes that one knapsack may visit: a few milliseconds. Reached only by pipelines of many sizes
# together with hundreds of required copies; up to there the answer is exact, beyond it the search is narrower.
_WORK = 40_000


def pack(
    able: Mapping[int, int], devices: int, least: int, microbatches: int, *, every_size: bool = False
) -> dict[int, int] | None:
    """Pipelines of each size, at least ``least`` of them, that get through ``microbatches`` in all; None if none do.

    Most pipelines of an optimum are of one size, or of two where the number of pipelines binds: those with which the
    problem is solved in fractions. All of these but a margin are set; a table decides on the rest. With a margin as
    large as the largest size that is exact where the number does not bind, since among s pipelines of other sizes
    some have a total that s divides, and can be exchanged for the most productive size s without loss.

    Args:
        able: microbatches that a pipeline of each size gets through in the time allowed.
        devices: how many may be used.
        every_size: consider every size and use as many devices as can be; otherwise sizes that smaller pipelines
            replace without loss are left out, which is faster.
    """
    sizes = dict(sorted(able.items())) if every_size else _irreplaceable(able)
    if not sizes or least * min(sizes) > devices:
        return None
    counts = _bulk(sizes, devices, least)
    margin = max(sizes)
    while True:
        kept = {size: max(count - margin, 0) for size, count in counts.items()}
        free = devices - sum(size * count for size, count in kept.items())
        missing = max(least - sum(kept.values()), 0)
        if margin == 1 or (free + 1) * (missing + 1) * len(sizes) <= _WORK:
            break
        margin //= 2
    wanted = microbatches - sum(sizes[size] * count for size, count in kept.items())
    rest = _table(sizes, free, missing, wanted)
    return None if rest is None else dict(sorted((Counter(kept) + rest).items()))


def _irreplaceable(able: Mapping[int, int]) -> dict[int, int]:
    """Leaves out every size whose work one or more smaller pipelines do on the same devices or fewer."""
    if not able:
        return {}
    kept: dict[int, int] = {}
    most = [0] * (max(able) + 1)
    for devices in range(1, len(most)):
        most[devices] = max([most[devices - 1], *(n + most[devices - size] for size, n in kept.items())])
        if able.get(devices, 0) > most[devices]:
            kept[devices] = most[devices] = able[devices]
    return kept


def _bulk(sizes: Mapping[int, int], devices: int, least: int) -> dict[int, int]:
    """The optimum in fractions, rounded down: one size, or the two around the mean size if ``least`` binds."""
    densest = max(sizes, key=lambda size: (sizes[size] / size, -size))
    if least * densest <= devices:
        return {densest: devices // densest}
    small, large = max(
        ((s, t) for s in sizes if s * least <= devices for t in sizes if t * least > devices),
        key=lambda pair: (
            sizes[pair[0]] + (sizes[pair[1]] - sizes[pair[0]]) * (devices / least - pair[0]) / (pair[1] - pair[0])
        ),
    )
    many = (devices - least * small) // (large - small)
    return {small: least - many, large: many}


def _table(sizes: Mapping[int, int], devices: int, least: int, wanted: int) -> Counter[int] | None:
    """Exact: at least ``least`` pipelines on ``devices`` or fewer that do ``wanted``, using the most devices."""
    best = [[-1] * (devices + 1) for _ in range(least + 1)]  # microbatches, by pipelines (up to least) and devices
    last = [[(0, 0)] * (devices + 1) for _ in range(least + 1)]  # (size, pipelines before) of the pipeline put last
    best[0][0] = 0
    for used in range(devices + 1):
        for count in range(least + 1):
            done = best[count][used]
            if done < 0:
                continue
            more = min(count + 1, least)
            row = best[more]
            for size, n in sizes.items():
                if used + size > devices:
                    break
                if done + n > row[used + size]:
                    row[used + size] = done + n
                    last[more][used + size] = size, count
    used = next((d for d in range(devices, -1, -1) if best[least][d] >= max(wanted, 0)), -1)
    if used < 0:
        return None
    chosen: Counter[int] = Counter()
    count = least
    while used:
        size, count = last[count][used]
        chosen[size] += 1
        used -= size
    return chosen
