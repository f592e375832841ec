"""Slow and plain versions of what the planner computes, to compare with: enumeration, and an event-by-event run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, combinations_with_replacement, pairwise

from elastic.planning import LayerProfile, ModelProfile, Template


def model(times: Sequence[tuple[float, float]], state: int = 100, activations: int = 10) -> ModelProfile:
    layers = (LayerProfile(f"layer-{i}", f, b, state, activations, 4) for i, (f, b) in enumerate(times))
    return ModelProfile(tuple(layers))


def random_model(rng: random.Random, most_layers: int) -> ModelProfile:
    """Small integers, so that sums of floats are exact and ties are frequent."""
    slow, heavy, often = rng.choice([1, 3, 10]), rng.choice([0, 1, 5, 20]), rng.choice([0.2, 0.7])
    layers = (
        LayerProfile(
            f"layer-{i}",
            rng.randint(0, slow),
            rng.randint(0, slow),
            rng.randint(0, 10),
            rng.randint(0, heavy) if rng.random() < often else 0,
            0,
        )
        for i in range(rng.randint(1, most_layers))
    )
    return ModelProfile(tuple(layers))


def splits(layers: int, size: int) -> Iterator[tuple[tuple[int, int], ...]]:
    for inner in combinations(range(1, layers), size - 1):
        edges = (0, *inner, layers)
        yield tuple(pairwise(edges))


def times(profile: ModelProfile, cuts: Sequence[tuple[int, int]]) -> tuple[list[float], list[float]]:
    forward = [sum(layer.forward_s for layer in profile.layers[a:b]) for a, b in cuts]
    backward = [sum(layer.backward_s for layer in profile.layers[a:b]) for a, b in cuts]
    return forward, backward


def oobleck(stages: Sequence[float], n: int) -> float:
    """The published formula, with the last slowest stage."""
    size, slow = len(stages), max(stages)
    k = max(i for i, w in enumerate(stages) if w == slow)
    return sum(stages) + (n - size + k - 1) * slow + sum(stages[k:])


def formula(forward: Sequence[float], backward: Sequence[float], n: int) -> float:
    stages = [f + b for f, b in zip(forward, backward, strict=True)]
    if n < len(stages):
        return sum(stages) + (n - 1) * (max(forward) + max(backward))
    slow = max(stages)
    k = max(i for i, w in enumerate(stages) if w == slow)
    return max(oobleck(stages, n), sum(stages[:k]) + n * slow)


def fits(profile: ModelProfile, cuts: Sequence[tuple[int, int]], n: int, device_bytes: int | None) -> bool:
    size = len(cuts)
    return device_bytes is None or all(
        profile.stage_bytes(a, b, n if n < size else size - i) <= device_bytes for i, (a, b) in enumerate(cuts)
    )


def best_time(profile: ModelProfile, size: int, n: int, device_bytes: int | None) -> float | None:
    every = (c for c in splits(len(profile), size) if fits(profile, c, n, device_bytes))
    return min((formula(*times(profile, cuts), n) for cuts in every), default=None)


def simulate(forward: Sequence[float], backward: Sequence[float], n: int, schedule: str) -> float:
    """End of the last task when every stage runs its list of tasks in order, each as soon as its input is there."""
    size = len(forward)
    done: dict[tuple[str, int, int], float] = {}
    lists: list[list[tuple[str, int]]] = []
    for k in range(size):
        ahead = n if schedule == "gpipe" else min(n, size - k)
        tasks = [("F", m) for m in range(ahead)]
        for m in range(n):
            tasks.append(("B", m))
            if ahead + m < n:
                tasks.append(("F", ahead + m))
        lists.append(tasks)
    at, clock = [0] * size, [0.0] * size
    while any(at[k] < len(lists[k]) for k in range(size)):
        before = sum(at)
        for k in range(size):
            while at[k] < len(lists[k]):
                kind, m = lists[k][at[k]]
                source = (kind, k - 1, m) if kind == "F" else (kind, k + 1, m)
                first = (kind == "F" and k == 0) or (kind == "B" and k == size - 1)
                if not first and source not in done:
                    break
                clock[k] = max(clock[k], 0.0 if first else done[source]) + (forward[k] if kind == "F" else backward[k])
                done[kind, k, m] = clock[k]
                at[k] += 1
        assert sum(at) > before, "the schedule is stuck"
    return max(clock)


def slowest(microbatches: int, chosen: Sequence[Template]) -> float | None:
    """Time of the slowest pipeline after the best distribution, by trying every distribution; None if there is none."""
    if not chosen:
        return 0.0 if microbatches == 0 else None
    head, rest = chosen[0], chosen[1:]
    best = None
    for n in range(head.least, microbatches + 1):
        others = slowest(microbatches - n, rest)
        if others is not None and (best is None or max(others, head.time(n)) < best):
            best = max(others, head.time(n))
    return best


def threshold(microbatches: int, chosen: Sequence[Template]) -> float | None:
    """The same by thresholds: the least T within which the pipelines get through all microbatches."""
    if microbatches < sum(t.least for t in chosen):
        return None
    candidates = sorted({t.time(n) for t in chosen for n in range(t.least, microbatches + 1)})
    for seconds in candidates:
        most = [sum(t.time(n) <= seconds for n in range(1, microbatches + 1)) for t in chosen]
        if all(n >= t.least for n, t in zip(most, chosen, strict=True)) and sum(most) >= microbatches:
            return seconds
    return None


def best_composition(
    devices: int, templates: Mapping[int, Template], least: int, microbatches: int
) -> tuple[float, int, int] | None:
    """(seconds, -pipelines, spares) of the best multiset of sizes, by trying all of them."""
    found = []
    for count in range(max(least, 1), devices + 1):
        for sizes in combinations_with_replacement(sorted(templates), count):
            if sum(sizes) > devices:
                continue
            seconds = threshold(microbatches, [templates[size] for size in sizes])
            if seconds is not None:
                found.append((seconds, -count, devices - sum(sizes)))
    return min(found, default=None)
