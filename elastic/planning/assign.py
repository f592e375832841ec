"""Who goes where at the least cost: kinds of slots to be filled, kinds of takers to fill them with.

Few kinds stand for many nodes: stages with the same cuts are alike, nodes that hold the same layers are alike. That
makes it a transportation problem, solved by successive shortest paths with prices (Edmonds & Karp, "Theoretical
improvements in algorithmic efficiency for network flow problems", JACM 1972; with one of each kind it is the Hungarian
method in the form of Jonker & Volgenant, Computing 1987). A path moves as many as fit through it, so the work depends
on the number of kinds, hardly on the number of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

# Pairs of kinds that one assignment may look at: a few hundredths of a second. 64 slots and 64 takers that are all
# different stay below it whatever their costs. Reached only where hundreds of nodes hold different sets of layers.
_WORK = 300_000


def assign(
    costs: Sequence[Sequence[int]], slots: Sequence[int], takers: Sequence[int], work: int = _WORK
) -> list[dict[int, int]]:
    """How many takers of each kind fill the slots of each kind, such that the sum of costs is the least possible.

    Exact up to ``work``; what is left to fill by then goes to the cheapest pairs first. Ties: fixed by the order of
    the kinds.

    Args:
        costs: ``costs[s][t]`` for one slot of kind s filled by a taker of kind t; 0 or more.
        slots: how many there are of each kind; all get filled.
        takers: how many there are of each kind, in all at least as many as slots.

    Returns:
        For each kind of slot ``{kind of taker: number}``.
    """
    flows: list[dict[int, int]] = [{} for _ in slots]
    filled_by: list[set[int]] = [set() for _ in takers]  # kinds of slots that a kind of taker fills
    open_slots, free = list(slots), list(takers)

    def fill(s: int, t: int, count: int) -> None:
        flows[s][t] = flows[s].get(t, 0) + count
        filled_by[t].add(s)

    # Invariant: costs[s][t] - price_s[s] - price_t[t] >= 0, = 0 where a taker fills a slot; a free taker has price 0.
    price_s, price_t = [min(row) for row in costs], [0] * len(takers)
    for s, row in enumerate(costs):
        for t, cost in enumerate(row):
            count = min(open_slots[s], free[t])
            if cost == price_s[s] and count:
                fill(s, t, count)
                open_slots[s] -= count
                free[t] -= count
    for first in range(len(slots)):
        while open_slots[first] and work > 0:
            reached_s, reached_t = {first: 0}, {}  # with their distance from the open slot
            slot_from: dict[int, int] = {}
            taker_from = [first] * len(takers)
            row, price = costs[first], price_s[first]
            distance = {t: row[t] - price - price_t[t] for t in range(len(takers))}
            while True:
                work -= len(distance)
                end = min(distance, key=lambda t: (distance[t], t))
                reached_t[end] = to_end = distance.pop(end)
                if free[end]:
                    break
                for s in sorted(filled_by[end] - reached_s.keys()):
                    reached_s[s], slot_from[s] = to_end, end
                    row, price = costs[s], price_s[s] - to_end
                    work -= len(distance)
                    for t, known in distance.items():
                        if (new := row[t] - price - price_t[t]) < known:
                            distance[t], taker_from[t] = new, s
            for s, at in reached_s.items():
                price_s[s] += to_end - at
            for t, at in reached_t.items():
                price_t[t] -= to_end - at
            path, t = [], end  # (slots that t fills now, t, the taker that they give up)
            while (s := taker_from[t]) != first:
                path.append((s, t, slot_from[s]))
                t = slot_from[s]
            path.append((first, t, -1))
            count = min([open_slots[first], free[end], *(flows[s][given] for s, _, given in path if given >= 0)])
            for s, t, given in path:
                fill(s, t, count)
                if given >= 0:
                    flows[s][given] -= count
                    if not flows[s][given]:
                        del flows[s][given]
                        filled_by[given].discard(s)
            open_slots[first] -= count
            free[end] -= count
    if any(open_slots):
        for _, s, t in sorted(
            (costs[s][t], s, t) for s, n in enumerate(open_slots) if n for t, m in enumerate(free) if m
        ):
            if count := min(open_slots[s], free[t]):
                fill(s, t, count)
                open_slots[s] -= count
                free[t] -= count
    return flows
