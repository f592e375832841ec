"""Templates against enumeration of all splits, and the formula against an event-by-event run of the schedule."""

from __future__ import annotations

import random
import time

import pytest
from planning_reference import best_time, fits, formula, model, oobleck, random_model, simulate, splits, times

from elastic.errors import PlanError
from elastic.planning import LayerProfile, ModelProfile, TemplateSearch, format_bytes, smallest_size, templates


@pytest.mark.parametrize("seed", range(8))
def test_every_template_is_the_best_split_that_fits(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    found = missing = 0
    for _ in range(250):
        profile = random_model(rng, 8)
        device_bytes = rng.choice([None, rng.randint(1, 80), rng.randint(5, 40)])
        search = TemplateSearch(profile, device_bytes)
        for size in range(1, len(profile) + 1):
            for n in {rng.randint(1, size), size, size + rng.randint(0, 12)}:
                expected = best_time(profile, size, n, device_bytes)
                template = search.best(size, n)
                case = (profile, device_bytes, size, n)
                assert (template is None) == (expected is None), case
                if n >= size:
                    assert search.feasible(size) == (expected is not None), case
                if template is None:
                    missing += 1
                    continue
                found += 1
                assert template.seconds == expected, case
                assert template.cuts in set(splits(len(profile), size)), case
                assert fits(profile, template.cuts, n, device_bytes), case
                assert formula(*times(profile, template.cuts), n) == expected, case
    assert found > 500
    assert missing > 200, "too few instances with tight memory"


def test_no_template_is_larger_than_the_model() -> None:
    assert TemplateSearch(model([(1, 2)] * 3), None).best(4, 8) is None
    assert list(templates(model([(1, 2)] * 3), range(1, 9), 8, None)) == [1, 2, 3]
    with pytest.raises(PlanError, match="no template of 0 stages"):
        TemplateSearch(model([(1, 2)]), None).best(0, 4)


def test_equal_layers_that_floats_cannot_add_exactly_still_split_evenly() -> None:
    template = TemplateSearch(model([(0.1, 0.2)] * 9), None).best(3, 12)
    assert template is not None
    assert template.cuts == ((0, 3), (3, 6), (6, 9))


def test_layers_that_may_go_either_way_are_spread_evenly() -> None:
    template = TemplateSearch(model([(1, 1)] * 8 + [(5, 5)] + [(1, 1)] * 8), None).best(5, 20)
    assert template is not None
    assert template.cuts == ((0, 4), (4, 8), (8, 9), (9, 13), (13, 17))


def test_a_template_predicts_other_numbers_of_microbatches() -> None:
    profile = model([(1, 2), (2, 4), (1, 1), (3, 2), (2, 2)])
    template = TemplateSearch(profile, None).best(3, 6)
    assert template is not None
    for n in range(3, 20):
        assert template.time(n) == formula(*times(profile, template.cuts), n)


def _stages(rng: random.Random, spread: float) -> tuple[list[float], list[float], int]:
    size = rng.randint(1, 8)
    work = [1 + spread * rng.random() for _ in range(size)]
    backward = rng.choice([0.5, 2 / 3, 0.75])
    return (
        [w * (1 - backward) for w in work],
        [w * backward for w in work],
        size + rng.choice([0, 1, rng.randint(0, 30)]),
    )


def test_1f1b_formula_is_exact_for_equal_stages_and_with_one_slower_one() -> None:
    for size in range(1, 8):
        for slow in range(size):
            for extra in (0.0, 0.5):
                forward = [1 + extra * (i == slow) for i in range(size)]
                for n in range(size, 3 * size + 3):
                    assert formula(forward, forward, n) == simulate(forward, forward, n, "1f1b")


def test_1f1b_formula_is_a_close_lower_bound_for_stages_that_differ() -> None:
    for spread, error in ((0.05, 0.02), (0.25, 0.07), (1.0, 0.16)):
        rng = random.Random(7)
        for _ in range(400):
            forward, backward, n = _stages(rng, spread)
            ran = simulate(forward, backward, n, "1f1b")
            assert (1 - error) * ran <= formula(forward, backward, n) <= ran * (1 + 1e-12), (forward, backward, n)


def test_gpipe_formula_is_exact_for_any_stages() -> None:
    rng = random.Random(11)
    for _ in range(300):
        size = rng.randint(2, 8)
        forward, backward = ([float(rng.randint(0, 9)) for _ in range(size)] for _ in range(2))
        n = rng.randint(1, size - 1)
        assert formula(forward, backward, n) == simulate(forward, backward, n, "gpipe")


def test_few_microbatches_do_not_pile_layers_onto_the_first_stage() -> None:
    """Why the published formula is bounded below by the work of the slowest stage."""
    uneven = [5.0, 1.0]
    assert oobleck(uneven, 3) == oobleck([3.0, 3.0], 3) == 12.0
    assert simulate([2.5, 0.5], [2.5, 0.5], 3, "1f1b") == 15.0
    template = TemplateSearch(model([(0.5, 0.5)] * 6), None).best(2, 3)
    assert template is not None
    assert template.cuts == ((0, 3), (3, 6))


def test_splits_run_close_to_the_best_of_all_splits() -> None:
    rng = random.Random(5)
    for _ in range(60):
        profile = model([(1 + 0.3 * rng.random(), 2 + 0.6 * rng.random()) for _ in range(rng.randint(4, 9))])
        size = rng.randint(2, min(5, len(profile)))
        n = size + rng.randint(0, 2)
        template = TemplateSearch(profile, None).best(size, n)
        assert template is not None
        best = min(simulate(*times(profile, cuts), n, "1f1b") for cuts in splits(len(profile), size))
        assert simulate(*times(profile, template.cuts), n, "1f1b") <= 1.15 * best


def test_smallest_size_is_the_first_that_fits() -> None:
    rng = random.Random(3)
    for _ in range(300):
        profile, device_bytes = random_model(rng, 7), rng.randint(5, 60)
        sizes = [s for s in range(1, len(profile) + 1) if best_time(profile, s, 99, device_bytes) is not None]
        if sizes:
            assert smallest_size(profile, device_bytes) == sizes[0]
        else:
            with pytest.raises(PlanError):
                smallest_size(profile, device_bytes)


def test_a_larger_pipeline_may_not_fit_where_a_smaller_one_does() -> None:
    """The first stage of a longer pipeline has more microbatches in flight."""
    profile = ModelProfile((LayerProfile("a", 1, 1, 0, 10, 0), LayerProfile("b", 1, 1, 0, 0, 0)))
    search = TemplateSearch(profile, 15)
    assert search.feasible(1)
    assert not search.feasible(2)


def test_a_layer_that_fits_only_the_last_stage_stays_there() -> None:
    """Cutting behind it would leave two stages for it and the layer after, one too far from the end."""
    work = ((5, 1), (5, 1), (4.5, 10), (4.5, 1))
    profile = ModelProfile(tuple(LayerProfile(f"l{i}", t, t, 0, heavy, 0) for i, (t, heavy) in enumerate(work)))
    template = TemplateSearch(profile, 15).best(3, 3)
    assert template is not None
    assert template.cuts == ((0, 1), (1, 2), (2, 4))


def test_a_layer_that_fits_no_device_is_named() -> None:
    small = LayerProfile("small", 1, 1, 1 << 20, 0, 0)
    with pytest.raises(PlanError, match=r"layer 'large' alone needs 26MiB, a device has 24MiB"):
        smallest_size(ModelProfile((small, LayerProfile("large", 1, 1, 25 << 20, 1 << 20, 0))), 24 << 20)


def test_a_model_that_no_number_of_devices_holds_is_refused() -> None:
    layer = LayerProfile("x", 1, 1, 0, 10 << 20, 0)
    with pytest.raises(PlanError, match=r"no number of devices of 15MiB holds the model: .* 20MiB in all"):
        smallest_size(ModelProfile((layer, layer)), 15 << 20)


def test_sizes_are_written_as_in_a_config() -> None:
    assert [format_bytes(n) for n in (0, 700, 1 << 10, 24 << 20, 3 << 29, (1 << 40) + 1)] == [
        "0B", "700B", "1KiB", "24MiB", "1.5GiB", "1.0TiB",
    ]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [("forward_s", -1.0), ("backward_s", float("nan")), ("state_bytes", -1)])
def test_a_profile_with_impossible_values_is_refused(key: str, value: float) -> None:
    fields = {"forward_s": 1, "backward_s": 1, "state_bytes": 1, "activation_bytes": 1, "output_bytes": 1, key: value}
    with pytest.raises(PlanError, match=f"layer 'x': {key} is {value}"):
        LayerProfile("x", **fields)
    with pytest.raises(PlanError, match="no layers"):
        ModelProfile(())


def test_a_profile_survives_json() -> None:
    profile = model([(0.1, 1 / 3), (1e-9, 7.0)])
    assert ModelProfile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize("device_bytes", [None, 3000])
def test_96_layers_and_24_sizes(device_bytes: int | None) -> None:
    rng = random.Random(96)
    profile = model([(rng.random(), 2 * rng.random()) for _ in range(96)])
    begin = time.perf_counter()
    found = templates(profile, range(1, 25), 96, device_bytes)
    print(f"96 layers, sizes 1 to 24, {device_bytes} bytes: {time.perf_counter() - begin:.3f} s")
    assert list(found) == list(range(1 if device_bytes is None else smallest_size(profile, device_bytes), 25))
    for size, template in found.items():
        assert fits(profile, template.cuts, 96, device_bytes)
        assert template.seconds == pytest.approx(formula(*times(profile, template.cuts), 96))
        if size - 1 in found:
            assert template.seconds < found[size - 1].seconds
