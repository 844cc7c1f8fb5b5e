"""How much memory is free."""

from __future__ import annotations

from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")


def free_memory(device: torch.device) -> int | None:
    """Bytes that a device can give without swapping; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    known = dict(line.split(":", 1) for line in lines if ":" in line)
    words = known.get("MemAvailable", "").split()
    return int(words[0]) * 1024 if words else None
