"""Composition: how many pipelines of each size run on the devices there are, and how many microbatches each takes.

The iteration ends with the slowest pipeline, so a composition is judged by that one's time after the best
distribution. Turned round: within a time T, a pipeline of size s gets through m_s(T) microbatches, and T is possible
if some composition gets through all of them. That is a knapsack (``pack.py``), and T is one of the times the
templates can take, so it is found by bisection. Cost: about (sizes + log M) small knapsacks, independent of the
number of devices.

Oobleck (SOSP'23) enumerates the compositions and distributes microbatches by an integer programme.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic.errors import PlanError
from elastic.planning.pack import pack
from elastic.planning.templates import Template, TemplateSearch


@dataclass(frozen=True)
class Composition:
    """Pipelines by ascending size, and their microbatches.

    Args:
        templates: one per pipeline.
        microbatches: how many each pipeline takes.
        spares: devices that no pipeline uses.
        seconds: predicted iteration time, that of the slowest pipeline.
        reason: what was chosen, in words.
    """

    templates: tuple[Template, ...]
    microbatches: tuple[int, ...]
    spares: int
    seconds: float
    reason: str


def distribute(microbatches: int, templates: Sequence[Template]) -> tuple[int, ...]:
    """Microbatches per pipeline such that the slowest pipeline is as fast as can be.

    Every pipeline gets the fewest its schedule works with, then each further microbatch goes to the pipeline that
    would finish first with it (the earlier one of equals). Times never fall with the number, which makes that exact.

    Raises:
        PlanError: there are too few microbatches for these pipelines, or no pipeline.
    """
    counts = [template.least for template in templates]
    left = microbatches - sum(counts)
    if left < 0 or not templates:
        raise PlanError(
            f"{len(templates)} pipelines need at least {sum(counts)} microbatches, there are {microbatches}",
            "use fewer pipelines or a smaller microbatch",
        )
    finish = [(template.time(counts[i] + 1), i) for i, template in enumerate(templates)]
    heapq.heapify(finish)
    for _ in range(left):
        i = finish[0][1]
        counts[i] += 1
        heapq.heapreplace(finish, (templates[i].time(counts[i] + 1), i))
    return tuple(counts)


def replicas(devices: int, smallest: int, fault_tolerance: int, microbatches: int) -> int:
    """How many pipelines there must be at least: ``fault_tolerance + 1``, or as many as devices and work allow."""
    return min(fault_tolerance + 1, devices // smallest, microbatches)


def compose(devices: int, templates: Mapping[int, Template], *, fault_tolerance: int, microbatches: int) -> Composition:
    """The fastest 1F1B composition with at least ``replicas(...)`` pipelines.

    Every pipeline gets as many microbatches as it has stages or more, so no more devices than microbatches are used;
    where microbatches are too few for that many pipelines, there are fewer (``compose_short`` does better there).
    Ties: more pipelines, then fewer spares.

    Args:
        devices: how many there are; those that do not help are spares.
        templates: 1F1B templates by size; the smallest size is n0.

    Raises:
        PlanError: no template, or fewer devices or microbatches than the smallest pipeline has stages.
    """
    if not templates:
        raise PlanError("no pipeline size fits in memory", "raise device_memory")
    smallest = min(templates)
    usable = min(devices, microbatches)
    if usable < smallest:
        raise PlanError(
            f"a pipeline of {smallest} needs {smallest} devices and as many microbatches, "
            f"there are {devices} and {microbatches}",
            "add nodes or use a smaller microbatch",
        )
    needed = min(replicas(devices, smallest, fault_tolerance, microbatches), usable // smallest)
    sizes = sorted(size for size in templates if size <= usable)

    def packed(seconds: float, count: int, *, every_size: bool = False) -> dict[int, int] | None:
        able = {size: _able(templates[size], seconds, microbatches) for size in sizes}
        able = {size: n for size, n in able.items() if n >= size}
        return pack(able, usable, count, microbatches, every_size=every_size)

    seconds = max(templates[size].time(microbatches) for size in sizes)
    for size in sizes:
        template = templates[size]
        high = _able(template, seconds, microbatches)
        while high >= size and template.time(high) >= seconds:
            high -= 1
        if high < size or packed(template.time(high), needed) is None:
            continue  # this size takes the best time found so far, or a longer one
        low = size
        while low < high:
            middle = (low + high) // 2
            if packed(template.time(middle), needed) is None:
                low = middle + 1
            else:
                high = middle
        seconds = template.time(high)
    low, high = needed, usable // smallest
    while low < high:  # most pipelines within the same time
        middle = (low + high + 1) // 2
        if packed(seconds, middle) is None:
            high = middle - 1
        else:
            low = middle
    counts = packed(seconds, low, every_size=True) or packed(seconds, low)
    assert counts is not None  # it was found above
    chosen = tuple(templates[size] for size in sorted(counts) for _ in range(counts[size]))
    return composed(devices, chosen, distribute(microbatches, chosen), smallest, fault_tolerance)


def compose_short(
    devices: int, smallest: int, search: TemplateSearch, *, fault_tolerance: int, microbatches: int
) -> Composition | None:
    """A composition where microbatches are too few to give each required pipeline one per stage: GPipe fills in.

    As many equal pipelines as devices and microbatches allow, microbatches spread evenly. More pipelines mean fewer
    microbatches in each, which is what both the time and the memory of GPipe depend on. Pipelines are of the smallest
    size; where not even one of these could run 1F1B, of the smallest size for which memory holds all microbatches of
    a pipeline at once. None where nothing fits.
    """
    largest = smallest if microbatches >= smallest else min(devices, len(search.profile))
    for size in range(smallest, largest + 1):
        count = min(devices // size, microbatches)
        each, more = divmod(microbatches, count)
        few = search.best(size, each)
        many = search.best(size, each + 1) if more else few
        if few is not None and many is not None:
            chosen = (*[few] * (count - more), *[many] * more)
            spread = (*[each] * (count - more), *[each + 1] * more)
            return composed(devices, chosen, spread, smallest, fault_tolerance)
    return None


def _able(template: Template, seconds: float, most: int) -> int:
    """The largest number of microbatches, up to ``most``, that the template finishes within ``seconds``."""
    if template.time(most) <= seconds:
        return most
    count = min(max(int((seconds - template.fixed_s) / template.step_s), 0), most) if template.step_s else 0
    while count < most and template.time(count + 1) <= seconds:  # the division may be off by a rounding
        count += 1
    while count > 0 and template.time(count) > seconds:
        count -= 1
    return count


def composed(
    devices: int, chosen: tuple[Template, ...], counts: tuple[int, ...], smallest: int, fault_tolerance: int
) -> Composition:
    """The composition of these templates and microbatches: what is spare, how long it takes, and what to say of it."""
    spares = devices - sum(template.size for template in chosen)
    seconds = max(template.time(n) for template, n in zip(chosen, counts, strict=True))
    words = [f"{_pipelines(chosen)}, {_microbatches(counts)}"]
    short = sum(template.schedule == "gpipe" for template in chosen)
    if short:
        words.append(f"{'all' if short == len(chosen) else short} with gpipe, for fewer microbatches than stages")
    if spares:
        words.append(f"{spares} spare")
    wanted = fault_tolerance + 1
    if len(chosen) < wanted:
        why = f"{devices} of {wanted * smallest} devices" if devices < wanted * smallest else "too few microbatches"
        words.append(f"{len(chosen)} of the {wanted} copies that fault tolerance {fault_tolerance} asks for: {why}")
    return Composition(chosen, counts, spares, seconds, "; ".join(words))


def _pipelines(chosen: Sequence[Template]) -> str:
    sizes = [template.size for template in chosen]
    if len(sizes) == 1:
        return f"1 pipeline of {sizes[0]}"
    if len(sizes) <= 4:
        return f"pipelines of {listed(sizes)}"
    return listed([f"{n} pipeline{'s' * (n > 1)} of {size}" for size, n in sorted(Counter(sizes).items())])


def _microbatches(counts: Sequence[int]) -> str:
    if len(counts) == 1:
        return f"{counts[0]} microbatch{'es' * (counts[0] > 1)}"
    if min(counts) == max(counts):
        return f"{counts[0]} microbatch{'es' * (counts[0] > 1)} each"
    return f"{listed(counts) if len(counts) <= 4 else f'{min(counts)} to {max(counts)}'} microbatches"


def listed(items: Sequence[object]) -> str:
    """``a, b and c``."""
    head = [str(item) for item in items]
    return head[0] if len(head) == 1 else f"{', '.join(head[:-1])} and {head[-1]}"
