from __future__ import annotations

import pytest

from elastic.rendezvous import Keys, Parsed

_KEYS = Keys("j")


@pytest.mark.parametrize(
    ("key", "tail", "parsed"),
    [
        (_KEYS.spec, "spec", Parsed("spec")),
        (_KEYS.leader, "leader", Parsed("leader")),
        (_KEYS.generation, "generation", Parsed("generation")),
        (_KEYS.epoch, "epoch", Parsed("epoch")),
        (_KEYS.progress, "progress", Parsed("progress")),
        (_KEYS.result, "result", Parsed("result")),
        (_KEYS.plan(7), "plans/0000000007", Parsed("plan", number=7)),
        (_KEYS.member("node-4"), "members/node-4", Parsed("member", name="node-4")),
        (_KEYS.report(7, "node-4"), "reports/0000000007/node-4", Parsed("report", number=7, name="node-4")),
        (_KEYS.event(12), "events/0000000012", Parsed("event", number=12)),
        (_KEYS.request("stop"), "requests/stop", Parsed("request", name="stop")),
        (_KEYS.attempt(9), "attempts/00000000000000000009", Parsed("attempt", number=9)),
    ],
)
def test_there_and_back(key: str, tail: str, parsed: Parsed) -> None:
    assert key == "/elastic/jobs/j/" + tail
    assert _KEYS.parse(key) == parsed


def test_prefixes() -> None:
    assert _KEYS.plan(1).startswith(_KEYS.plans)
    assert _KEYS.member("a").startswith(_KEYS.members)
    assert _KEYS.report(1, "a").startswith(_KEYS.reports(1))
    assert _KEYS.reports(1).startswith(_KEYS.reports())
    assert not _KEYS.report(10, "a").startswith(_KEYS.reports(1))
    assert _KEYS.event(1).startswith(_KEYS.events)
    assert _KEYS.request("a").startswith(_KEYS.requests)
    assert _KEYS.event(9) < _KEYS.event(10)


@pytest.mark.parametrize("key", ["/elastic/jobs/jj/spec", "spec", _KEYS.root, _KEYS.root + "plans/7", _KEYS.members])
def test_other_keys_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match="not a key"):
        _KEYS.parse(key)


def test_what_would_break_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match="slash"):
        _KEYS.member("a/b")
    with pytest.raises(ValueError, match="non-empty"):
        _KEYS.request("")
    with pytest.raises(ValueError, match="10 digits"):
        _KEYS.plan(10**10)
