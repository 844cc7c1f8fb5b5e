"""Every method with settings that keep tests quick."""

from __future__ import annotations

from fewshift import METHODS, Method

QUICK: dict[str, dict] = {
    "auto": {"epochs": 2},
    "blend-head": {"epochs": 2},
    "blend-all": {"epochs": 2},
    "lccs": {"epochs": 2, "grid": 3},
    "lp-ft": {"epochs": 1, "probe_epochs": 2, "folds": 2},
    **{name: {"epochs": 2} for name in ("finetune-bn", "finetune-head", "finetune-features", "l2", "l2-sp")},
    **{name: {"epochs": 2} for name in ("delta-reg", "late-fusion", "flute")},
    "shot": {"epochs": 2, "batch_size": 8, "lr": 0.01},
    "sfda": {"steps": 4, "memory_every": 2, "batch_size": 8},
    "sdda": {"epochs": 2, "start_epoch": 1, "batch_size": 8, "size": 8, "width": 4},
}


def quick(name: str) -> Method:
    return METHODS[name](**QUICK.get(name, {}))
