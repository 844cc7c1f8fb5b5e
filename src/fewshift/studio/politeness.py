"""Imported by the server of processes alone, and first: it and what it starts shall not slow down the page."""

from __future__ import annotations

import os
from contextlib import suppress

LESS_URGENT = 5

with suppress(OSError):
    os.nice(LESS_URGENT)
