"""``params_digest``: one hash over all parameters and optimizer state, in layer order, whatever the plan was."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def combined_digest(layers: Iterable[tuple[str, str]]) -> str:
    """One xxh3-128 (hex) over ``(name, digest)`` of every layer, in layer order."""
    h = xxhash.xxh3_128()
    for name, digest in layers:
        h.update(f"{name} {digest}\n".encode())
    return h.hexdigest()
