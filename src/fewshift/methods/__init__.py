"""Every method, by name. A new method costs one file and one line here."""

from __future__ import annotations

from fewshift.method import Method
from fewshift.methods.adabn import AdaBN
from fewshift.methods.lccs import LCCS
from fewshift.methods.source import Source
from fewshift.methods.testtime_bn import TestTimeBN

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Source,
        TestTimeBN,
        AdaBN,
        LCCS,
    )
}

__all__ = ["LCCS", "METHODS", "AdaBN", "Source", "TestTimeBN"]
