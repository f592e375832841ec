"""Randomness as a function of names, never of where or in which order something runs.

A layer's initial weights depend on (seed, layer); a forward pass of it on (seed, step, microbatch, layer).
"""

from __future__ import annotations

import random

import numpy as np
import torch
import xxhash


def seed_of(*key: int | str) -> int:
    """A 63-bit seed for a key of integers and strings, the same on every machine and in every run."""
    return xxhash.xxh3_64_intdigest("\0".join(f"{type(part).__name__}:{part}" for part in key).encode()) >> 1


def set_all_seeds(seed: int) -> None:
    """`set_seed`, and the generators of Python and NumPy that datasets use."""
    set_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def set_seed(seed: int) -> None:
    """Seeds the generators of the devices in use. Cheap enough to call once per layer and microbatch."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
