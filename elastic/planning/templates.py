"""Templates: for one pipeline size, the contiguous layer split with the least iteration time that fits in memory.

A pipeline of size S has S stages on S devices. Stage i (0-based) takes w_i = F_i + B_i per microbatch; k is the
slowest stage, the last one if several are; n is the number of microbatches.

1F1B, n >= S. The time is that of Oobleck (SOSP'23), but never less than the work of stage k itself:

    T = sum_{i<k} w_i + max( n * w_k,  2 * sum_{i>=k} w_i + (n - (S-k) - 1) * w_k )

The second term is Oobleck's, ``sum(w) + (n - S + k - 1) * w_k + sum_{i>=k} w_i``, written from stage k's view: fill up
to k, one round trip behind k, the steady state at k's pace, one round trip, drain. With few microbatches and light
stages behind k that counts stage k for less than its n turns: with n = S and k = 0 it is 2 * sum(w) - w_0 and rewards
piling layers onto stage 0. The first term, a bound of any schedule, forbids it. For equal stages both give
(n + S - 1) * w. T is exact for stages that are equal but for one slower one. Otherwise it is an estimate that no run of
the schedule was seen to undercut; runs take a few per cent more where stages differ by a quarter. Taking the *last*
slowest stage gives the largest, hence closest, of the values that tied stages give.

GPipe, n < S (1F1B needs a microbatch per stage): all forwards, flush, all backwards. Identical jobs through machines
in a row take the sum of one job plus (n - 1) times the slowest machine, each way, so this is the exact critical path:

    T = sum(w) + (n - 1) * (max F_i + max B_i)

Both leave out the time of the boundary tensors. Both are linear in n for a given split.

Memory: stage i holds its state and the activations of the microbatches in flight: S - i in 1F1B, n in GPipe.

The search is exact, unlike Oobleck's divide and conquer, and fast. See ``TemplateSearch.best``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from elastic.errors import PlanError
from elastic.planning.gpipe import Cuts, gpipe_split
from elastic.planning.profile import ModelProfile, format_bytes

Schedule = Literal["1f1b", "gpipe"]


@dataclass(frozen=True)
class Template:
    """One split of the model into ``size`` stages.

    Args:
        size: stages, and devices.
        cuts: ``(start, stop)`` layers of every stage.
        schedule: which schedule it is for; a 1F1B template is good for ``size`` microbatches or more, a GPipe
            template for ``microbatches`` or fewer (all of them are in memory at once).
        microbatches: the number it was optimized for.
        fixed_s, step_s: iteration time with n microbatches is ``fixed_s + n * step_s``.
    """

    size: int
    cuts: Cuts
    schedule: Schedule
    microbatches: int
    fixed_s: float
    step_s: float

    @property
    def seconds(self) -> float:
        """Iteration time with the number of microbatches it was optimized for."""
        return self.time(self.microbatches)

    def time(self, microbatches: int) -> float:
        """Iteration time with another number of microbatches; never falls when the number grows."""
        return self.fixed_s + microbatches * self.step_s

    @property
    def least(self) -> int:
        """Fewest microbatches the schedule works with."""
        return self.size if self.schedule == "1f1b" else 1


def _nearest(prefix: tuple[int, ...], wanted: int, least: int, most: int) -> int:
    """A cut close to where the prefix sum is ``wanted``, inside ``least..most``: keeps free choices even."""
    return min(max(bisect_left(prefix, wanted), least), most)


class TemplateSearch:
    """Finds templates of one profile on devices of ``device_bytes`` each (None: unlimited).

    Holds the tables that all sizes share, so ask one object for many sizes. Distances count from the end of the
    pipeline: the last stage has distance 1. In 1F1B the distance is also the number of microbatches in flight.
    """

    def __init__(self, profile: ModelProfile, device_bytes: int | None) -> None:
        self.profile = profile
        self.device_bytes = device_bytes
        self._count = count = len(profile)
        self._time = time = tuple(f + b for f, b in zip(profile.forward_prefix, profile.backward_prefix, strict=True))
        self._by_distance: dict[int, tuple[list[int], list[int]]] = {}
        self._starts: dict[int, list[int]] = {}
        self._last_start: list[int] = []
        self._found: dict[tuple[int, int], Template | None] = {}
        slowest = max(time[i + 1] - time[i] for i in range(count))
        # every range of layers that can be the slowest stage, with the largest distance at which it fits
        self._ranges = sorted(
            (time[stop] - time[start], start, stop, self._deepest(start, stop))
            for start in range(count)
            for stop in range(start + 1, count + 1)
            if time[stop] - time[start] >= slowest
        )

    def _deepest(self, start: int, stop: int) -> int:
        if self.device_bytes is None:
            return self._count
        state = self.profile.stage_bytes(start, stop, 0)
        activations = self.profile.stage_bytes(start, stop, 1) - state
        if state > self.device_bytes:
            return 0
        return min(self._count, (self.device_bytes - state) // activations) if activations else self._count

    def _fits(self, in_flight: int) -> tuple[list[int], list[int]]:
        """``(stop, start)``: ``stop[s]`` ends the longest stage from s that fits, ``start[t]`` begins that up to t."""
        if in_flight not in self._by_distance:
            count, limit = self._count, self.device_bytes
            if limit is None:
                self._by_distance[in_flight] = [count] * (count + 1), [0] * (count + 1)
            else:
                used = [self.profile.stage_bytes(0, i, in_flight) for i in range(count + 1)]
                stop = [bisect_right(used, u + limit) - 1 for u in used]
                self._by_distance[in_flight] = stop, [bisect_left(used, u - limit) for u in used]
        return self._by_distance[in_flight]

    def feasible(self, size: int) -> bool:
        """Whether some split into ``size`` stages fits with 1F1B."""
        return size <= self._count and self._reach(size, self._time[-1])[-1] == self._count

    def _reach(self, size: int, limit: int) -> list[int]:
        """``reach[i]``: how many layers the first i stages can hold, none slower than ``limit``.

        Filling each stage to the brim is exact: towards the end of the pipeline memory only gets looser, so the
        layers that i stages can hold are all the numbers from i to ``reach[i]``. The list ends early when the model
        is complete, or when stage i cannot hold even the one layer it must.
        """
        reach = [0]
        for distance in range(size, 0, -1):
            at = reach[-1]
            stop = min(bisect_right(self._time, self._time[at] + limit) - 1, self._fits(distance)[0][at])
            if stop < len(reach):
                break
            reach.append(stop)
            if stop == self._count:
                break
        return reach

    def _earliest(self, limit: int) -> list[int]:
        """``earliest[j]``: negated first layer that the last j stages can start at, all faster than ``limit``.

        Negated, so that it ascends. It ends at layer 0, or where one more stage gains nothing.
        """
        if limit not in self._starts:
            earliest = [-self._count]
            while earliest[-1] < 0:
                stop = -earliest[-1]
                start = max(bisect_right(self._time, self._time[stop] - limit), self._fits(len(earliest))[1][stop])
                if start >= stop:
                    break
                earliest.append(-start)
            self._starts[limit] = earliest
        return self._starts[limit]

    def _latest(self) -> list[int]:
        """``latest[j]``: last layer that the last j stages can start at, for the rest to fit before them.

        A layer that does not fit alone at distance j must lie behind that stage, so stage j ends no later than there.
        """
        if not self._last_start:
            latest = [self._count]
            for distance in range(1, self._count + 1):
                stop = self._fits(distance)[0]
                alone = next((layer for layer in range(self._count) if stop[layer] == layer), self._count)
                latest.append(min(latest[-1], alone) - 1)
            self._last_start = latest
        return self._last_start

    def best(self, size: int, microbatches: int) -> Template | None:
        """The template with the least time, or None where no split fits.

        1F1B: every range [a, b) is tried as the slowest stage, with time B. The k stages before it may take up to B,
        those behind it less. Time does not fall with k, so the least k that can be had is the best one, and it is
        bounded below by how far k stages reach, by the distance at which [a, b) fits, and by how many stages [b, L)
        can be cut into; above by a, and by the fewest stages that hold [b, L). Ranges come by ascending B, and
        T >= n * B ends the search early. Ties: the least B, then the least a, then the least b; layers that could go
        either way are spread evenly.

        Raises:
            PlanError: ``size`` or ``microbatches`` is not positive.
        """
        if size < 1 or microbatches < 1:
            raise PlanError(f"no template of {size} stages and {microbatches} microbatches", "both must be 1 or more")
        if (size, microbatches) not in self._found:
            self._found[size, microbatches] = self._best(size, microbatches)
        return self._found[size, microbatches]

    def _best(self, size: int, microbatches: int) -> Template | None:
        if microbatches < size:
            found = gpipe_split(self.profile, self._fits(microbatches)[0], size)
            if found is None:
                return None
            cuts, slowest = found
            ticks = self.profile.ticks
            return Template(size, cuts, "gpipe", microbatches, (self._time[-1] - slowest) / ticks, slowest / ticks)
        if not self.feasible(size):
            return None
        time, total, latest = self._time, self._time[-1], self._latest()
        most_behind = [bisect_right(latest, -stop, key=int.__neg__) - 1 for stop in range(self._count + 1)]
        best: tuple[int, int, int, int, int] | None = None  # T, B, a, b, k
        reach_at, reach = -1, [0]
        for index in range(bisect_left(self._ranges, (-(-total // size),)), len(self._ranges)):
            slow, start, stop, deepest = self._ranges[index]
            if best and microbatches * slow >= best[0]:
                break
            k = max(size - deepest, size - 1 - most_behind[stop], -(-time[start] // slow) if slow else min(start, 1))
            k = max(k, 0)
            if k > start or k >= size:
                continue
            round_trips = 2 * (total - time[start]) + (microbatches - size - 1) * slow
            # this k is only a lower bound yet, but cheap, and rules most ranges out
            if best and time[start] + max(microbatches * slow, round_trips + k * slow) >= best[0]:
                continue
            earliest = self._earliest(slow)
            behind = bisect_left(earliest, -stop)
            if behind == len(earliest):
                continue
            if slow != reach_at:
                reach_at, reach = slow, self._reach(size, slow)
            k = max(k, bisect_left(reach, start))
            if reach[-1] < start or k > min(start, size - 1 - behind):
                continue
            seconds = time[start] + max(microbatches * slow, round_trips + k * slow)
            if best is None or seconds < best[0]:
                best = seconds, slow, start, stop, k
        if best is None:
            return None
        seconds, slow, start, stop, k = best
        split = (*self._before(size, slow, start, k), (start, stop), *self._behind(slow, stop, size - k - 1))
        ticks = self.profile.ticks
        return Template(size, split, "1f1b", microbatches, (seconds - microbatches * slow) / ticks, slow / ticks)

    def _before(self, size: int, limit: int, stop: int, stages: int) -> Cuts:
        reach = self._reach(size, limit)
        cuts: list[tuple[int, int]] = []
        for i in range(stages, 0, -1):
            least = max(i - 1, self._fits(size - i + 1)[1][stop], bisect_left(self._time, self._time[stop] - limit))
            most = min(reach[min(i - 1, len(reach) - 1)], stop - 1)
            start = _nearest(self._time, self._time[stop] * (i - 1) // i, least, most)
            cuts.append((start, stop))
            stop = start
        return tuple(reversed(cuts))

    def _behind(self, limit: int, start: int, stages: int) -> Cuts:
        earliest, latest, time = self._earliest(limit), self._latest(), self._time
        cuts: list[tuple[int, int]] = []
        for j in range(stages, 0, -1):
            least = max(-earliest[min(j - 1, len(earliest) - 1)], start + 1)
            most = min(latest[j - 1], self._fits(j)[0][start], bisect_left(time, time[start] + limit) - 1)
            stop = _nearest(time, time[start] + (time[-1] - time[start]) // j, least, most)
            cuts.append((start, stop))
            start = stop
        return tuple(cuts)


def timed(profile: ModelProfile, cuts: Cuts, microbatches: int) -> Template:
    """The 1F1B template of a given split, by the formula above: to compare a split that runs already with new ones."""
    work = [f + b for f, b in zip(profile.forward_prefix, profile.backward_prefix, strict=True)]
    size, total = len(cuts), work[-1]
    stages = [work[stop] - work[start] for start, stop in cuts]
    slow = max(stages)
    k = max(i for i in range(size) if stages[i] == slow)
    before = work[cuts[k][0]]
    seconds = before + max(microbatches * slow, 2 * (total - before) + (microbatches - (size - k) - 1) * slow)
    ticks = profile.ticks
    return Template(size, cuts, "1f1b", microbatches, (seconds - microbatches * slow) / ticks, slow / ticks)


def smallest_size(profile: ModelProfile, device_bytes: int | None) -> int:
    """n0: the fewest devices whose memory holds the model with 1F1B.

    Raises:
        PlanError: no number of devices holds it; names the layer where one alone is too large.
    """
    search = TemplateSearch(profile, device_bytes)
    for size in range(1, len(profile) + 1):
        if search.feasible(size):
            return size
    assert device_bytes is not None  # without a limit one device holds everything
    for index, layer in enumerate(profile.layers):
        if (need := profile.stage_bytes(index, index + 1, 1)) > device_bytes:
            raise PlanError(
                f"layer {layer.name!r} alone needs {format_bytes(need)}, a device has {format_bytes(device_bytes)}",
                "raise device_memory, make the layer smaller, or use a smaller microbatch",
            )
    total = profile.stage_bytes(0, len(profile), 1)
    raise PlanError(
        f"no number of devices of {format_bytes(device_bytes)} holds the model: with one microbatch in flight it needs "
        f"{format_bytes(total)} in all, and a longer pipeline keeps more of them in flight",
        "raise device_memory, or use a smaller microbatch",
    )


def templates(
    profile: ModelProfile, sizes: Iterable[int], microbatches: int, device_bytes: int | None
) -> dict[int, Template]:
    """The best template of every size that fits, for ``microbatches`` microbatches in its pipeline."""
    search = TemplateSearch(profile, device_bytes)
    found = {size: search.best(size, microbatches) for size in sizes}
    return {size: template for size, template in found.items() if template is not None}
