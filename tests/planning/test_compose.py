"""Composition and distribution against enumeration."""

from __future__ import annotations

import random
import time

import pytest
from planning_reference import best_composition, model, slowest, threshold

from elastic.errors import PlanError
from elastic.planning import Template, TemplateSearch, compose, compose_short, distribute, replicas, templates
from elastic.planning.pack import pack


def _template(size: int, fixed_s: float, step_s: float) -> Template:
    return Template(size, tuple((i, i + 1) for i in range(size)), "1f1b", size, fixed_s, step_s)


def _any_templates(rng: random.Random, sizes: range) -> dict[int, Template]:
    """Times without rhyme or reason, so that no property of real pipelines hides a mistake."""
    return {size: _template(size, rng.randint(0, 9), rng.randint(1, 12)) for size in sizes if rng.random() < 0.8}


def _real_templates(rng: random.Random, sizes: range, n: int) -> dict[int, Template]:
    profile = model([(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(max(sizes))])
    return templates(profile, sizes, n, None)


@pytest.mark.parametrize("seed", range(4))
def test_composition_is_the_best_of_all(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        smallest, devices, microbatches, tolerance = (
            rng.randint(1, 4),
            rng.randint(1, 10),
            rng.randint(1, 16),
            rng.randint(0, 3),
        )
        sizes = range(smallest, rng.randint(smallest, 9) + 1)
        able = _any_templates(rng, sizes) if rng.random() < 0.5 else _real_templates(rng, sizes, 9)
        if not able or min(able) > min(devices, microbatches):
            continue
        least = min(replicas(devices, min(able), tolerance, microbatches), microbatches // min(able))
        expected = best_composition(devices, able, least, microbatches)
        assert expected is not None
        found = compose(devices, able, fault_tolerance=tolerance, microbatches=microbatches)
        assert (found.seconds, -len(found.templates), found.spares) == expected, (devices, able, least, microbatches)
        assert sum(found.microbatches) == microbatches
        assert all(n >= t.size for n, t in zip(found.microbatches, found.templates, strict=True))
        assert sum(t.size for t in found.templates) + found.spares == devices


def test_f_plus_one_pipelines_wherever_there_are_devices_and_microbatches() -> None:
    rng = random.Random(17)
    for _ in range(400):
        smallest, tolerance = rng.randint(1, 5), rng.randint(0, 6)
        enough = (tolerance + 1) * smallest
        devices, microbatches = enough + rng.randint(0, 40), enough + rng.randint(0, 100)
        able = {smallest: _template(smallest, 50, 50)} | _any_templates(rng, range(smallest + 1, smallest + 8))
        found = compose(devices, able, fault_tolerance=tolerance, microbatches=microbatches)
        assert len(found.templates) >= tolerance + 1
        assert "copies" not in found.reason


@pytest.mark.parametrize(("smallest", "tolerance", "devices"), [(2, 2, 7), (3, 4, 17), (3, 4, 16), (3, 4, 15)])
def test_counts_where_borrowing_and_merging_lose_a_copy(smallest: int, tolerance: int, devices: int) -> None:
    able = templates(model([(1, 2)] * 12), range(smallest, 2 * smallest), 4 * smallest, None)
    found = compose(devices, able, fault_tolerance=tolerance, microbatches=48)
    assert len(found.templates) == tolerance + 1
    assert found.spares == 0


def test_fewer_devices_than_copies_need_degrade_with_a_reason() -> None:
    able = templates(model([(1, 2)] * 6), range(2, 7), 8, None)
    found = compose(3, able, fault_tolerance=1, microbatches=8)
    assert [t.size for t in found.templates] == [3]
    assert found.reason == (
        "1 pipeline of 3, 8 microbatches; 1 of the 2 copies that fault tolerance 1 asks for: 3 of 4 devices"
    )


def test_nothing_to_compose_is_refused() -> None:
    able = {3: _template(3, 1, 1)}
    with pytest.raises(PlanError, match="a pipeline of 3 needs 3 devices and as many microbatches, there are 2 and 9"):
        compose(2, able, fault_tolerance=0, microbatches=9)
    with pytest.raises(PlanError, match="there are 9 and 2"):
        compose(9, able, fault_tolerance=0, microbatches=2)
    with pytest.raises(PlanError, match="no pipeline size fits"):
        compose(9, {}, fault_tolerance=0, microbatches=9)


def test_pure_data_parallel_where_it_is_the_fastest() -> None:
    able = templates(model([(1, 2)] * 8), range(1, 9), 8, None)
    found = compose(8, able, fault_tolerance=1, microbatches=16)
    assert [t.size for t in found.templates] == [1] * 8
    assert found.reason == "8 pipelines of 1, 2 microbatches each"


def test_devices_beyond_the_microbatches_are_spares() -> None:
    able = templates(model([(1, 2)] * 8), range(1, 9), 8, None)
    found = compose(12, able, fault_tolerance=1, microbatches=5)
    assert (found.microbatches, found.spares) == ((1,) * 5, 7)


@pytest.mark.parametrize("seed", range(3))
def test_distribution_is_the_best_of_all(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(80):
        chosen = [_template(rng.randint(1, 3), rng.randint(0, 9), rng.randint(0, 9)) for _ in range(rng.randint(1, 4))]
        microbatches = rng.randint(1, 14)
        expected = slowest(microbatches, chosen)
        assert threshold(microbatches, chosen) == expected  # two references, one answer
        if expected is None:
            with pytest.raises(PlanError, match="microbatches"):
                distribute(microbatches, chosen)
            continue
        counts = distribute(microbatches, chosen)
        assert sum(counts) == microbatches
        assert max(t.time(n) for t, n in zip(chosen, counts, strict=True)) == expected
    with pytest.raises(PlanError, match="0 pipelines"):
        distribute(3, [])


def test_short_of_microbatches_gpipe_fills_in() -> None:
    search = TemplateSearch(model([(1, 2)] * 6), 400)
    found = compose_short(6, 3, search, fault_tolerance=1, microbatches=5)
    assert found is not None
    assert [(t.size, t.schedule) for t in found.templates] == [(3, "gpipe"), (3, "1f1b")]
    assert found.microbatches == (2, 3)
    assert (
        found.reason == "pipelines of 3 and 3, 2 and 3 microbatches; 1 with gpipe, for fewer microbatches than stages"
    )


def test_short_of_microbatches_memory_may_ask_for_a_larger_pipeline() -> None:
    profile = model([(1, 2)] * 4, state=10, activations=30)
    search = TemplateSearch(profile, 100)  # 2 layers fit with one microbatch in flight, one with two or three
    assert [size for size in range(1, 5) if search.feasible(size)] == [3]
    assert compose_short(3, 3, search, fault_tolerance=0, microbatches=2) is None
    found = compose_short(4, 3, search, fault_tolerance=0, microbatches=2)
    assert found is not None
    assert [(t.size, t.schedule) for t in found.templates] == [(4, "gpipe")]
    assert compose_short(3, 3, search, fault_tolerance=2, microbatches=3) is not None  # one pipeline, 1f1b


@pytest.mark.parametrize("seed", range(3))
def test_packing_many_devices_agrees_with_the_whole_table(seed: int) -> None:
    """The bulk that is set beforehand costs nothing, whether or not the number of pipelines binds."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(25):
        sizes = {size: rng.randint(size, 40) for size in range(rng.randint(1, 4), rng.randint(5, 8))}
        devices = rng.randint(60, 140)
        least = rng.randint(1, devices // min(sizes))
        most = _most(sizes, devices, least)
        assert most is not None
        assert pack(sizes, devices, least, most + 1) is None
        counts = pack(sizes, devices, least, most)
        assert counts is not None, (sizes, devices, least, most)
        assert sum(counts.values()) >= least
        assert sum(size * n for size, n in counts.items()) <= devices
        assert sum(sizes[size] * n for size, n in counts.items()) >= most


def _most(sizes: dict[int, int], devices: int, least: int) -> int | None:
    best: list[dict[int, int]] = [{0: 0}] + [{} for _ in range(devices)]  # by devices used: pipelines -> microbatches
    for used in range(devices + 1):
        for count, done in best[used].items():
            for size, n in sizes.items():
                if used + size <= devices:
                    row = best[used + size]
                    row[count + 1] = max(row.get(count + 1, 0), done + n)
    return max((done for row in best for count, done in row.items() if count >= least), default=None)


@pytest.mark.parametrize("devices", [1000, 10_000])
@pytest.mark.parametrize("device_bytes", [None, 700, 1300])
def test_thousands_of_devices(devices: int, device_bytes: int | None) -> None:
    rng = random.Random(devices)
    profile = model([(1 + rng.random() / 3, 2 + rng.random() / 3) for _ in range(24)])
    able = templates(profile, range(1, 25), 24, device_bytes)
    begin = time.perf_counter()
    found = compose(devices, able, fault_tolerance=2, microbatches=4 * devices)
    print(f"{devices} devices, {device_bytes} bytes: {time.perf_counter() - begin:.3f} s: {found.reason}")
    assert len(found.templates) >= 3
    assert found.spares <= devices // 100
    assert sum(found.microbatches) == 4 * devices
