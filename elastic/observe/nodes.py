"""The nodes of a run as a small map: a line per pipeline, a box per node. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from elastic.observe.picture import Picture
from elastic.observe.text import plural, shorten

LABEL = 12  # columns of "pipeline 12 "
_NAME = 24  # columns of a name at most
_ARROW, _GAP = "▸", " "
_ACTIVE, _FORMING, _SPARE, _WAITING, _LOST = "green", "yellow", "cyan", "yellow", "red"


def node_map(picture: Picture, width: int, rows: int) -> list[Text]:
    """At most ``rows`` lines of at most ``width`` columns; what finds no room is counted."""
    lines = [_line(f"pipeline {i}", nodes, _ARROW, picture, width) for i, nodes in enumerate(picture.pipelines)]
    others = [
        _line(label, nodes, _GAP, picture, width)
        for label, nodes in (("spare", picture.spares), ("waiting", picture.idle))
        if nodes
    ]
    room = max(1, rows - len(others))
    if len(lines) > room:
        hidden = picture.pipelines[room - 1 :]
        nodes = plural(sum(map(len, hidden)), "node")
        more = Text(f"{'':{LABEL}}… {plural(len(hidden), 'more pipeline')} of {nodes}", "dim")
        lines = [*lines[: room - 1], more]
    return [*lines, *others][:rows]


def _line(label: str, nodes: Sequence[str], between: str, picture: Picture, width: int) -> Text:
    """Boxes in a row; those in the middle give way to a count where they do not fit."""
    boxes = [_box(node, picture) for node in nodes]
    used, kept, count = LABEL, 0, f"{between}… {len(boxes)} more …{between}"
    widths = [box.cell_len + len(between) for box in boxes]
    if LABEL + sum(widths) - len(between) <= width:
        kept = len(boxes)
    else:
        used += widths[-1] + len(count)
        while kept < len(boxes) - 1 and used + widths[kept] <= width:
            used += widths[kept]
            kept += 1
    line = Text.assemble((f"{shorten(label, LABEL - 1):{LABEL}}", "dim"))
    line.append_text(Text.assemble((between, "dim")).join(boxes[:kept]))
    if kept < len(boxes):
        line.append(f"{between if kept else ''}… {len(boxes) - kept - 1} more …{between}", "dim")
        line.append_text(boxes[-1])
    return line


def _box(node: str, picture: Picture) -> Text:
    colour, mark = _colour(node, picture)
    name = mark + shorten(node, _NAME)
    return Text.assemble(("▐", colour), (name, f"bold black on {colour}"), ("▌", colour))


def _colour(node: str, picture: Picture) -> tuple[str, str]:
    """Its colour, and a mark for what must be seen without colours too."""
    if node not in picture.members:
        return _LOST, "✕"
    if node in picture.spares:
        return _SPARE, ""
    if node in picture.idle:
        return _WAITING, ""
    return (_FORMING, "") if picture.phase == "forming" else (_ACTIVE, "")
