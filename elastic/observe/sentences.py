"""One sentence per event of a run's history. Pure.

An event is a record ``{"seq", "time", "kind", …}``; what else it holds depends on its kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic.observe.text import number, one_line, plural, size

Event = Mapping[str, Any]
_SIZES_LISTED = 8


def sentence(event: Event) -> str:
    """What happened, on one line. An event of an unknown kind, or with keys missing, lists what it holds."""
    tell = _SENTENCES.get(str(event.get("kind")), _unknown)
    try:
        return one_line(tell(event))
    except (KeyError, TypeError, ValueError, AttributeError):
        # Written by another version: the history must stay readable.
        return one_line(_unknown(event))


def pipelines_in_words(pipelines: Sequence[Sequence[str]]) -> str:
    """``2 pipelines (2, 3)``; the numbers are stages."""
    sizes = [len(nodes) for nodes in pipelines]
    if len(sizes) <= _SIZES_LISTED:
        listed = ", ".join(map(str, sizes))
    else:
        listed = ", ".join(f"{count} of {size}" for size, count in sorted(Counter(sizes).items()))
    return f"{plural(len(sizes), 'pipeline')} ({listed})"


def _started(event: Event) -> str:
    return f"started {event['config']} on {plural(event['nodes'], 'node')}"


def _node_joined(event: Event) -> str:
    return f"{event['node']} joined"


def _node_left(event: Event) -> str:
    causes = {"worker": "lost its worker", "node": "was lost", "hang": "had its worker ended"}
    return f"{event['node']} {causes.get(event.get('cause', ''), 'left')}"


def _node_refused(event: Event) -> str:
    return f"{event['node']} was refused: {event['reason']}"


def _waiting(event: Event) -> str:
    return f"waiting: {event['reason']}"


def _plan(event: Event) -> str:
    return f"epoch {event['epoch']}: {pipelines_in_words(event['pipelines'])}: {event['reason']}"


def _formed(event: Event) -> str:
    return f"epoch {event['epoch']} formed, training"


def _broken(event: Event) -> str:
    return f"{event['node']} could not reach a peer in epoch {event['epoch']}: {event['reason']}"


def _user_error(event: Event) -> str:
    tries = plural(event["tries"], "time")
    return f"step {event['step'] + 1} raised on {event['node']} ({tries}): {event['message']}"


def _recovered(event: Event) -> str:
    lost = "nothing lost" if not event["lost_steps"] else f"{plural(event['lost_steps'], 'step')} lost"
    if "pipelines" in event and event["losses"]:  # of a view that leaves out what led to it
        before, after = event["pipelines"]
        kept = plural(before, "pipeline") + (" kept" if before == after else f" → {after}")
        return " · ".join([_losses_in_words(event["losses"]), kept, f"{event['total_s']:.2f} s", lost])
    who = ", ".join(f"{loss['node']} ({loss['cause']})" for loss in event["losses"])
    return f"recovered{' from the loss of ' + who if who else ''} in {event['total_s']:.2f} s, {lost}"


def _losses_in_words(losses: Sequence[Event]) -> str:
    """``node-1 and node-2 died, worker of node-3 hung``."""
    by_cause: dict[str, list[str]] = {}
    for loss in losses:
        by_cause.setdefault(loss["cause"], []).append(loss["node"])
    words = {"node": ("", "died"), "worker": ("worker of ", "died"), "hang": ("worker of ", "hung")}
    parts = []
    for cause, nodes in by_cause.items():
        whose, what = words.get(cause, ("", f"was lost ({cause})"))
        *others, last = nodes
        parts.append(f"{whose}{', '.join(others)}{' and ' if others else ''}{last} {what}")
    return ", ".join(parts)


def _rollback(event: Event) -> str:
    where = f"the checkpoint of step {event['to_step']}" if event["to_step"] else "the start"
    return f"no copy of some layers is left: back to {where}, {plural(event['lost_steps'], 'step')} lost"


def _resumed(event: Event) -> str:
    return f"resumes from the checkpoint of step {event['step']}"


def _checkpoint_started(event: Event) -> str:
    return f"writing the checkpoint of step {event['step']}"


def _checkpoint_saved(event: Event) -> str:
    stall, upload = event["stall_s"] * 1e3, event["upload_s"]
    return (
        f"checkpoint of step {event['step']} saved: {size(event['bytes'])} in {upload:.2f} s,"
        f" stalled for {stall:.0f} ms"
    )


def _checkpoint_failed(event: Event) -> str:
    return f"checkpoint of step {event['step']} failed, training goes on: {event['reason']}"


def _checkpoint_rejected(event: Event) -> str:
    return f"the checkpoint of step {event['step']} is damaged, an older one is used: {event['reason']}"


def _hung(event: Event) -> str:
    state = "was" if event["runs"] else "did not run, it was"
    return f"{event['node']} hangs: no step for {event['for_s']:.1f} s, it {state} at: {event['what']}"


def _quarantined(event: Event) -> str:
    times = plural(event["failures"], "time")
    return f"{event['node']} failed {times} lately and is left out for {event['for_s']:.0f} s"


def _quarantine_over(event: Event) -> str:
    return f"{event['node']} may be used again: {event['reason']}"


def _standstill(event: Event) -> str:
    return f"no step for {event['for_s']:.1f} s though all nodes wait for each other: they form again"


def _reconfigured(event: Event) -> str:
    return f"switched to epoch {event['epoch']}, training paused for {event['pause_s']:.2f} s"


def _spare(event: Event) -> str:
    return f"{event['node']} is a spare"


def _draining(event: Event) -> str:
    return f"{event['node']} hands its work over"


def _drain_refused(event: Event) -> str:
    return f"{', '.join(event['nodes'])} cannot be drained: {event['reason']}"


def _node_released(event: Event) -> str:
    return f"{event['node']} has handed over its work and may go"


def _size_requested(event: Event) -> str:
    return f"asked for {plural(event['nodes'], 'node')}"


def _lease_expired(event: Event) -> str:
    return f"the lease of {event['node']} has expired; it trains on as long as votes pass"


def _stop_requested(_: Event) -> str:
    return "stopping at the next voted step"


def _ended(event: Event) -> str:
    state, step = event["state"], event["step"]
    if event.get("error"):
        where = f" on {event['node']}" if event.get("node") else ""
        return f"{state} at step {step}{where}: {event['error']['message']}"
    loss = f", loss {number(event['loss'])}" if event.get("loss") is not None else ""
    return f"{state} at step {step}{loss}"


def _unknown(event: Event) -> str:
    facts = [f"{key} {value}" for key, value in event.items() if key not in ("seq", "time", "kind")]
    kind = str(event.get("kind", "event without a kind")).replace("_", " ")
    return f"{kind}: {', '.join(facts)}" if facts else kind


_SENTENCES: dict[str, Callable[[Event], str]] = {
    "started": _started,
    "node_joined": _node_joined,
    "node_left": _node_left,
    "node_refused": _node_refused,
    "waiting": _waiting,
    "plan": _plan,
    "formed": _formed,
    "broken": _broken,
    "user_error": _user_error,
    "recovered": _recovered,
    "rollback": _rollback,
    "resumed": _resumed,
    "checkpoint_started": _checkpoint_started,
    "checkpoint_saved": _checkpoint_saved,
    "checkpoint_failed": _checkpoint_failed,
    "checkpoint_rejected": _checkpoint_rejected,
    "hung": _hung,
    "standstill": _standstill,
    "quarantined": _quarantined,
    "quarantine_over": _quarantine_over,
    "reconfigured": _reconfigured,
    "spare": _spare,
    "draining": _draining,
    "drain_refused": _drain_refused,
    "node_released": _node_released,
    "size_requested": _size_requested,
    "lease_expired": _lease_expired,
    "stop_requested": _stop_requested,
    "ended": _ended,
}
