"""Process groups of an epoch between real processes: meeting, giving up, aborting, and forming again."""

from __future__ import annotations

import itertools
import socket
import time

import pytest
from torch.distributed import PrefixStore, TCPStore

from elastic.engine.comm import serve_store
from elastic.planning import LayerProfile, ModelProfile, Node, make_plan
from tests.engine.peer import Peer

LAYERS = 4


@pytest.fixture(scope="module")
def store():
    server, address = serve_store("127.0.0.1")
    yield address
    del server  # it serves as long as it is referred to


@pytest.fixture(scope="module")
def pool():
    """Peers that are kept from test to test, and so form again and again."""
    kept = []
    yield kept
    for peer in kept:
        peer.close()


@pytest.fixture
def world(pool):
    """``(several peers)``, each idle."""

    def several(count):
        new = [Peer() for _ in range(count - len(pool))]
        for peer in new:
            assert peer.hear()["said"] == "ready"
        pool.extend(new)
        return pool[:count]

    yield several
    for peer in [peer for peer in pool if not peer.is_idle()]:  # killed, or still at what a failed test began
        peer.close()
        pool.remove(peer)


PREFIXES = (f"test/{i}" for i in itertools.count())


def plan_of(nodes, stages=1):
    profile = ModelProfile(tuple(LayerProfile(f"l{i}", 1.0, 2.0, 100, 10, 5) for i in range(LAYERS)))
    memory = None if stages == 1 else 100 * LAYERS // stages + 60
    plan = make_plan(
        profile, [Node(f"n{i}") for i in range(nodes)], microbatches=8, fault_tolerance=0, device_bytes=memory
    )
    assert [len(pipeline.stages) for pipeline in plan.pipelines] == [stages] * (nodes // stages)
    return plan


def form(peer, rank, plan, store, prefix, meet_s=20.0, connect_s=20.0):
    peer.tell(
        "form", rank=rank, plan=plan.to_json(), store=store, prefix=prefix, meet_s=meet_s, connect_s=connect_s
    )  # fmt: skip


def form_all(peers, plan, store):
    prefix = next(PREFIXES)
    for rank, peer in enumerate(peers):
        form(peer, rank, plan, store, prefix)
    said = [peer.hear() for peer in peers]
    assert [message["said"] for message in said] == ["formed"] * len(peers), said
    return said


def reduce_all(peers, group="world", size=1):
    for peer in peers:
        peer.tell("reduce", group=group, size=size)
    said = [peer.hear() for peer in peers]
    assert [message["said"] for message in said] == ["reduced"] * len(peers), said
    return [message["sums"] for message in said]


def test_ranks_that_come_late_are_waited_for(world, store):
    peers, plan, prefix = world(3), plan_of(3), next(PREFIXES)
    for rank in (2, 0, 1):
        form(peers[rank], rank, plan, store, prefix)
        if rank != 1:
            time.sleep(0.4)
            assert all(peer.has_said_nothing() for peer in peers)
    said = [peer.hear() for peer in peers]
    assert [message["said"] for message in said] == ["formed"] * 3, said
    assert reduce_all(peers) == [[7]] * 3


def test_the_groups_of_pipelines_and_of_owners(world, store):
    peers, plan = world(4), plan_of(4, stages=2)
    said = form_all(peers, plan, store)
    places = sorted(plan.ranks(), key=lambda place: place.rank)
    mates = [[other.rank for other in places if other.pipeline == place.pipeline] for place in places]
    assert reduce_all(peers, "pipeline") == [[sum(2**rank for rank in each)] for each in mates]
    owners = [[rank for rank in range(4) if set(plan.owners(place.start)) >= {rank}] for place in places]
    assert reduce_all(peers, "buckets") == [[sum(2**rank for rank in each)] for each in owners]
    # runs of layers with equal owners share a group
    assert [message["units"] for message in said] == [[list(range(place.start, place.stop))] for place in places]


def test_a_rank_that_never_comes_is_named(world, store):
    peers, plan, prefix = world(4), plan_of(4), next(PREFIXES)
    for rank in (0, 2):
        form(peers[rank], rank, plan, store, prefix, meet_s=1.0)
    for rank in (0, 2):
        message = peers[rank].hear()
        assert message["said"] == "failed"
        assert message["reason"] == "ranks [1, 3] did not come"
        assert 1.0 <= message["took"] < 4.0
    form_all(peers, plan, store)
    assert reduce_all(peers) == [[15]] * 4


def test_a_newer_epoch_ends_the_meeting_at_once(world, store):
    peers, plan, prefix = world(3), plan_of(3), next(PREFIXES)
    for rank in (0, 1):
        form(peers[rank], rank, plan, store, prefix)
    time.sleep(0.3)
    told = time.monotonic()
    for rank in (0, 1):
        peers[rank].tell("supersede")
    for rank in (0, 1):
        message = peers[rank].hear()
        assert message["said"] == "superseded"
        assert message["at"] - told < 1.0
    form_all(peers, plan, store)
    assert reduce_all(peers) == [[7]] * 3


def test_a_rank_that_meets_but_never_connects(world, store):
    peers, plan, prefix = world(3), plan_of(3), next(PREFIXES)
    host, _, port = store.rpartition(":")
    PrefixStore(prefix, TCPStore(host, int(port), is_master=False, wait_for_workers=False)).set("here/2", "1")
    for rank in (0, 1):
        form(peers[rank], rank, plan, store, prefix, connect_s=2.0)
    for rank in (0, 1):
        message = peers[rank].hear()
        assert message["said"] == "failed", message
        assert message["took"] < 8.0
    form_all(peers, plan, store)
    assert reduce_all(peers) == [[7]] * 3


def test_a_store_that_is_not_there(world, store):
    (peer,) = world(3)[:1]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    form(peer, 0, plan_of(1), address, next(PREFIXES), connect_s=1.0)
    message = peer.hear()
    assert message["said"] == "failed"
    assert message["took"] < 4.0


def test_a_newer_epoch_ends_the_waiting_for_a_store_at_once(world):
    # The worker with the store may have died while the others form.
    (peer,) = world(3)[:1]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    form(peer, 0, plan_of(1), address, next(PREFIXES), connect_s=5.0)
    time.sleep(0.5)
    told = time.monotonic()
    peer.tell("supersede")
    message = peer.hear()
    assert message["at"] - told < 1.0
    assert message["said"] == "superseded"


@pytest.mark.scenario
@pytest.mark.parametrize("size", [1, 5_000_000])
@pytest.mark.parametrize("stages", [1, 2])
def test_scenario_1_survivors_of_a_kill_are_freed_by_an_abort_and_form_again(size, stages, world, store):
    peers, plan = world(4), plan_of(4, stages)
    form_all(peers, plan, store)
    assert reduce_all(peers) == [[15]] * 4
    dead, survivors = peers[3], peers[:3]
    for peer in survivors:
        peer.tell("reduce", group="world", size=size)
    time.sleep(0.3)
    dead.process.kill()
    dead.process.wait()
    time.sleep(0.5)
    freed = [not peer.has_said_nothing() for peer in survivors]
    aborted = time.monotonic()
    for peer in survivors:
        peer.tell("abort")
    said = [peer.hear() for peer in survivors]
    seconds = [message["at"] - aborted for message in said]
    print(f"freed by a reset: {freed}; seconds from the abort: {[round(s, 3) for s in seconds]}")
    assert [message["said"] for message in said] == ["broken"] * 3, said
    assert max(seconds) < 5.0
    form_all(survivors, plan_of(3), store)
    assert reduce_all(survivors) == [[7]] * 3
    assert reduce_all(survivors, "buckets") == [[7]] * 3


def test_an_abort_frees_ranks_that_wait_for_one_that_is_only_slow(world, store):
    peers, plan = world(3), plan_of(3)
    form_all(peers, plan, store)
    for peer in peers[:2]:
        peer.tell("reduce", group="world", size=1)
    time.sleep(0.3)
    assert all(peer.has_said_nothing() for peer in peers)
    aborted = time.monotonic()
    for peer in peers:
        peer.tell("abort")
    said = [peer.hear() for peer in peers[:2]]
    assert [message["said"] for message in said] == ["broken"] * 2, said
    assert max(message["at"] for message in said) - aborted < 5.0
    peers[2].tell("reduce", group="world", size=1)
    assert peers[2].hear()["said"] == "broken"  # also what begins later
    form_all(peers, plan, store)
    assert reduce_all(peers) == [[7]] * 3


def test_aborting_twice_and_aborting_idle_groups(world, store):
    peers, plan = world(2), plan_of(2)
    form_all(peers, plan, store)
    for _ in range(2):
        peers[0].tell("abort")
        peers[1].tell("abort")
    time.sleep(0.2)
    peers[0].tell("reduce", group="world", size=1)
    assert peers[0].hear()["said"] == "broken"  # nothing more runs in these groups
    form_all(peers, plan, store)
    assert reduce_all(peers) == [[3]] * 2
