"""Small pieces of text that fit a terminal. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import datetime

BLOCKS = "▁▂▃▄▅▆▇█"


def one_line(value: object) -> str:
    """Any value as one line: line ends become spaces, and nothing in it can move a cursor or set a colour."""
    return " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", str(value)).replace("\x1b", "").split())


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The curve of ``values`` in at most ``width`` blocks; more values than that are averaged in neighbouring groups.

    A group without a finite value shows as ``×``.
    """
    count = min(width, len(values))
    groups = [values[len(values) * i // count : len(values) * (i + 1) // count] for i in range(count)]
    means = [_mean(group) for group in groups]
    finite = [mean for mean in means if mean is not None]
    if not finite:
        return "×" * count
    low, high = min(finite), max(finite)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join("×" if mean is None else BLOCKS[round((mean - low) * scale)] for mean in means)


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def number(value: float | None) -> str:
    """``2.4312``, ``12,345``, ``3.2e-05``; ``–`` where there is none."""
    if value is None:
        return "–"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"
    if abs(value) >= 100:
        return f"{value:.1f}"
    return f"{value:.4f}" if abs(value) >= 0.01 else f"{value:.2g}"


def rate(value: float) -> str:
    """A number per second, as few digits as say something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """``0:42``, ``12:03``, ``1:02:03``, ``2d 3:04:05``."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short_time(seconds: float) -> str:
    """A short span in the unit that fits it: ``850 µs``, ``12.3 ms``, ``4.56 s``."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def clock_time(unix: object) -> str:
    """The local time of day."""
    if not isinstance(unix, int | float) or not math.isfinite(unix):
        return "--:--:--"
    return datetime.fromtimestamp(unix).strftime("%H:%M:%S")


def plural(count: object, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def size(count: float) -> str:
    """Bytes as ``97.3 KiB``, ``1.2 GiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def shorten(text: str, width: int) -> str:
    """Cut in the middle, since names of machines differ at their ends."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"
