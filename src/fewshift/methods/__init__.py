"""Every method, by name. A new method costs one file and one line here."""

from __future__ import annotations

from fewshift.method import Method
from fewshift.methods.adabn import AdaBN
from fewshift.methods.alpha_bn import AlphaBN
from fewshift.methods.delta_reg import DeltaReg
from fewshift.methods.finetune import L2, FinetuneBN, FinetuneFeatures, FinetuneHead
from fewshift.methods.flute import Flute
from fewshift.methods.l2sp import L2SP
from fewshift.methods.late_fusion import LateFusion
from fewshift.methods.lccs import LCCS
from fewshift.methods.lp_ft import LPFT
from fewshift.methods.sdda import SDDA
from fewshift.methods.sfda import SFDA
from fewshift.methods.shot import SHOT
from fewshift.methods.source import Source
from fewshift.methods.tent import Tent
from fewshift.methods.testtime_bn import TestTimeBN

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Source,
        TestTimeBN,
        AlphaBN,
        Tent,
        AdaBN,
        FinetuneBN,
        FinetuneHead,
        FinetuneFeatures,
        L2,
        L2SP,
        DeltaReg,
        LateFusion,
        Flute,
        LPFT,
        LCCS,
        SHOT,
        SFDA,
        SDDA,
    )
}

__all__ = ["LCCS", "METHODS", "AdaBN", "Source", "Tent", "TestTimeBN"]
