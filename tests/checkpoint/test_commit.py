from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from checkpoint.commit import claim_generation, claim_lineage, commit, prune, survey
from checkpoint.layout import Attempt, generation_name, lineage_name
from checkpoint.reader import Checkpoint, Corrupt, Incomplete
from checkpoint.store import Store
from checkpoint.writer import Item, write_part


def part(store, attempt, writer="w"):
    return write_part(store, attempt, writer, [Item("t", "uint8", (3,), b"abc")], {})


def save(store, *version):
    attempt = Attempt(1, *version)
    commit(store, attempt, [part(store, attempt)], {"step": attempt.step}, 1.0)
    return attempt


def test_a_store_tells_its_history(store):
    assert survey(store).generations == {}
    assert survey(store).newest() is None
    assert claim_generation(store, {"job": "one"}) == 1
    assert claim_lineage(store, 1, None, {}) == 0
    first = [save(store, 0, step, 1) for step in (50, 100, 150)]
    assert claim_lineage(store, 1, first[1], {"why": "rollback"}) == 1
    second = save(store, 1, 120, 4)
    found = survey(store)
    assert {n: record["job"] for n, record in found.generations.items()} == {1: "one"}
    assert found.lineages(1)[0].items() >= {"base": None, "step": 0}.items()
    assert found.lineages(1)[1].items() >= {"base": first[1].manifest, "step": 100, "why": "rollback"}.items()
    assert found.surviving(1) == [second, first[1], first[0]]
    assert found.committed(1) == [second, *first[::-1]]
    assert found.newest() == second

    # A new generation's first step outranks all of the old one.
    assert claim_generation(store, {"job": "two"}) == 2
    assert survey(store).newest() == second
    claim_lineage(store, 2, None, {})
    young = Attempt(2, 0, 10, 1)
    commit(store, young, [part(store, young)], {}, 2.0)
    assert survey(store).newest() == young


def test_committing_again_is_the_same_as_once(store):
    attempt = Attempt(1, 0, 5, 1)
    parts = [part(store, attempt)]
    manifest = commit(store, attempt, parts, {"a": 1}, 1.0)
    assert commit(store, attempt, parts, {"a": 2}, 2.0) == manifest
    assert Checkpoint.open(store, attempt).meta == {"a": 1}


def test_only_what_is_there_can_be_committed(store):
    attempt = Attempt(1, 0, 5, 1)
    parts = [part(store, attempt, w) for w in ("a", "b")]
    pack, index = attempt.pack("b", 0), attempt.index("b")
    whole, listed = store.read(pack), store.read(index)
    store.write(pack, whole[:-1])
    with pytest.raises(Corrupt, match=pack):
        commit(store, attempt, parts, {}, 1.0)
    store.delete(pack)
    with pytest.raises(Incomplete, match=pack):
        commit(store, attempt, parts, {}, 1.0)
    store.write(pack, whole)
    store.write(index, listed.replace(b'"b"', b'"c"'))
    with pytest.raises(Corrupt, match=index):
        commit(store, attempt, parts, {}, 1.0)
    store.delete(index)
    with pytest.raises(Incomplete, match=index):
        commit(store, attempt, parts, {}, 1.0)
    assert store.read(attempt.manifest) is None
    store.write(index, listed)
    commit(store, attempt, parts, {}, 1.0)


@pytest.mark.scenario
def test_25_a_second_attempt_at_a_step_is_not_disturbed_by_the_first(store):
    left = Attempt(1, 0, 5, 1)
    store.write(left.pack("w", 0), b"half")
    again = save(store, 0, 5, 2)
    Checkpoint.open(store, again).verify()


def test_of_many_claims_each_gets_its_own(place):
    stores = [place.store() for _ in range(6)]
    if not stores[0].conditional:
        pytest.skip("this server ignores conditions")
    start = threading.Barrier(len(stores))

    def race(store):
        start.wait()
        return claim_generation(store, {}), claim_lineage(store, 1, None, {})

    with ThreadPoolExecutor(len(stores)) as pool:
        won = list(pool.map(race, stores))
    assert sorted(g for g, _ in won) == [1, 2, 3, 4, 5, 6]
    assert sorted(lineage for _, lineage in won) == [0, 1, 2, 3, 4, 5]


def test_a_damaged_record_is_named(tmp_path):
    store = Store(str(tmp_path))
    claim_generation(store, {})
    claim_lineage(store, 1, None, {})
    save(store, 0, 5, 1)
    store.write(lineage_name(1, 0), b"{}")
    for call in (lambda: survey(store).surviving(1), lambda: prune(store, 1, 1)):
        with pytest.raises(Corrupt, match=lineage_name(1, 0)):
            call()
    store.write(generation_name(1), b"")
    with pytest.raises(Corrupt, match=generation_name(1)):
        survey(store)


@pytest.mark.scenario
def test_26_retention_counts_only_what_is_committed_and_not_undone(store):
    claim_generation(store, {})
    claim_lineage(store, 1, None, {})
    first = [save(store, 0, step, 1) for step in (10, 20, 30, 40, 50)]
    claim_lineage(store, 1, first[2], {})
    left, coming = Attempt(1, 0, 25, 1), Attempt(1, 1, 60, 2)  # of no manifest
    for attempt in (left, coming):
        part(store, attempt)
    assert prune(store, 1, 2, in_use=[first[0]]) == [left, first[3], first[4]]
    assert survey(store).committed(1) == [first[2], first[1], first[0]]
    assert store.list(left.folder) == store.list(first[3].folder) == []
    assert store.list(coming.folder) != []
    for attempt in first[:3]:
        Checkpoint.open(store, attempt).verify()
    second = save(store, 1, 35, 2)
    assert prune(store, 1, 0) == first[:3]
    assert survey(store).committed(1) == [second]
    assert prune(store, 1, 1) == []
    assert store.list(coming.folder) != []


def test_nothing_is_deleted_before_something_counts(store):
    claim_generation(store, {})
    claim_lineage(store, 1, None, {})
    part(store, Attempt(1, 0, 10, 1))
    save(store, 0, 20, 1)
    claim_lineage(store, 1, None, {})
    before = store.list("")
    assert prune(store, 1, 1) == []
    assert store.list("") == before


def test_other_generations_are_left_alone(store):
    for generation in (1, 2):
        claim_generation(store, {})
        claim_lineage(store, generation, None, {})
        for step in (10, 20):
            attempt = Attempt(generation, 0, step, 1)
            commit(store, attempt, [part(store, attempt)], {}, 0)
    prune(store, 2, 1)
    found = survey(store)
    assert [len(found.surviving(g)) for g in (1, 2)] == [2, 1]


def test_a_deletion_that_was_cut_short_is_finished_by_the_next(tmp_path, seed, monkeypatch):
    draw = random.Random(seed)
    store = Store(str(tmp_path))
    claim_generation(store, {})
    claim_lineage(store, 1, None, {})
    saved = [save(store, 0, step, 1) for step in (10, 20, 30, 40)]
    delete = store.delete

    def by_one(prefix):
        for name in store.list(prefix):
            step_or_stop(name)

    def step_or_stop(name):
        if draw.random() < 0.3:
            raise KeyboardInterrupt
        delete(name)

    monkeypatch.setattr(store, "delete", step_or_stop)
    monkeypatch.setattr(store, "delete_tree", by_one)
    while True:
        try:
            prune(store, 1, 1)
            break
        except KeyboardInterrupt:
            for attempt in survey(store).committed(1):
                Checkpoint.open(store, attempt).verify()
    assert survey(store).committed(1) == [saved[-1]]
    assert {name.split("/")[2] for name in store.list("g00000001/attempts")} == {saved[-1].folder.split("/")[2]}
