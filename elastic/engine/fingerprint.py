"""What the bits of a result depend on beside the job: library versions, instruction set, threads, GPU settings."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch


def fingerprint() -> dict[str, str]:
    """Of this process. Two nodes of one ``exact`` job must agree in every entry."""
    out = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
        "machine": platform.machine(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "cpu": _vector_extensions(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }
    if torch.cuda.is_available():
        out["gpu"] = torch.cuda.get_device_name()
        out["cuda"] = str(torch.version.cuda)
        out["tf32"] = str(torch.backends.cuda.matmul.allow_tf32)
    return out


def _vector_extensions() -> str:
    """Vendor and vector extensions, by which BLAS libraries choose their kernels."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    vendor = re.search(r"^vendor_id\s*:\s*(\S+)", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    wanted = sorted(f for f in (flags.group(1).split() if flags else []) if re.match(r"avx|amx|fma|sve|asimd|bf16", f))
    return " ".join(([vendor.group(1)] if vendor else []) + wanted)


def differences(mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """``["torch: 2.13.0 here, 2.12.0 there", …]``; empty when both give the same bits."""
    keys = sorted(mine.keys() | theirs.keys())
    return [
        f"{key}: {mine.get(key, 'none')} here, {theirs.get(key, 'none')} there"
        for key in keys
        if mine.get(key) != theirs.get(key)
    ]
