import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.layout import (
    Attempt,
    attempts_in,
    generation_name,
    generations_in,
    lineage_name,
    lineages_in,
    surviving,
)

numbers = st.integers(0, 10**9)
attempts = st.builds(Attempt, numbers, numbers, numbers, numbers)


@given(attempts)
def test_names_are_parsed_back(attempt):
    for name in (attempt.manifest, attempt.index("w-1"), attempt.pack("w-1", 3)):
        assert Attempt.parse(name) == attempt
        assert attempts_in([name, f"{name}~/x", "probe", f"x/{name}"]) == {attempt}


@given(attempts, attempts)
def test_names_sort_like_attempts(a, b):
    assert (a < b) == ((a.generation, *a.version) < (b.generation, *b.version))
    if max(*a.version, *b.version) < 10**8 and a.generation == b.generation:
        assert (a < b) == (a.manifest < b.manifest)


@given(numbers, numbers)
def test_records_are_parsed_back(generation, lineage):
    name = generation_name(generation)
    assert generations_in([name, "generations/x.json", f"{name}.tmp"]) == {generation: name}
    name = lineage_name(generation, lineage)
    assert lineages_in([name, f"{name}x", "g00000001/lineages/1.json"]) == {lineage: name}


@pytest.mark.parametrize("name", ["", "probe", "g00000001/manifests/1-2-3.json", "g00000001/attempts/x"])
def test_other_names_are_not_attempts(name):
    with pytest.raises(ValueError, match="not the name of a manifest"):
        Attempt.parse(name)


@pytest.mark.parametrize("writer", ["", "a/b", ".hidden", "ä", "a b"])
def test_writers_that_make_no_object_names_are_refused(writer):
    with pytest.raises(ValueError, match="writer"):
        Attempt(1, 0, 1, 0).index(writer)


def test_undone_steps_do_not_count():
    def made(lineage, *steps):
        return [Attempt(1, lineage, step, lineage) for step in steps]

    first, second, third = made(0, 50, 100, 150), made(1, 120, 200), made(2, 110)
    every = [*first, *second, *third]
    claims = {0: {"base": None}}
    assert surviving(claims, first) == first[::-1]
    claims[1] = {"base": first[1].manifest}
    assert surviving(claims, every) == [*second[::-1], first[1], first[0]]
    claims[2] = {"base": first[1].manifest}  # goes back behind lineage 1
    assert surviving(claims, every) == [*third, first[1], first[0]]
    claims[3] = {"base": second[0].manifest}  # asked for by hand
    assert surviving(claims, every) == [second[0], first[1], first[0]]
    claims[4] = {"base": None}
    assert surviving(claims, every) == []
    assert surviving({}, every) == []


@given(st.data())
def test_survivors_are_those_of_a_history_told_step_by_step(data):
    """The model keeps the list of checkpoints one would go back through, and cuts it at every claim."""
    claims, committed, alive = {}, [], []
    step = 0
    for _ in range(data.draw(st.integers(0, 25))):
        event = data.draw(st.sampled_from(["claim", "commit", "commit", "late"]))
        if event == "claim":
            base = data.draw(st.sampled_from([None, *alive]))
            claims[len(claims)] = {"base": base.manifest if base else None}
            alive = alive[: alive.index(base) + 1] if base else []
            step = base.step if base else 0
        elif event == "commit" and claims:
            step += data.draw(st.integers(1, 9))
            attempt = Attempt(1, max(claims), step, data.draw(st.integers(0, 3)))
            committed.append(attempt)
            alive.append(attempt)
        elif len(claims) > 1:  # by somebody who has not heard of the newest lineage
            lineage = data.draw(st.integers(0, len(claims) - 2))
            committed.append(Attempt(1, lineage, 1000 + len(committed), 0))
    assert surviving(claims, data.draw(st.permutations(committed))) == alive[::-1]
