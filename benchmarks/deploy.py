"""Many sites on one device: the speed of a session that was switched to a site, and what switching costs.

A plain session opens the adapted network as a file of its own, by onnxruntime alone. The switched one opens the base
network and becomes the site. Everything runs on one thread; sides of a ratio take turns, and the fastest round counts.
Two plain sessions of one file show how far a ratio of equal things is from 1 on this machine.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

import fewshift
from core import fastest, network, show, support
from fewshift import Preprocess
from fewshift.deploy.edge import Session

ROUNDS, OPENINGS = {1: 300, 8: 40}, 8  # rounds by batch size
STEPS = Preprocess(256, 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NETWORKS = ("resnet18", "mobilenet_v3_small")


def plain_session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name in NETWORKS:
            compare(name, Path(folder))


def compare(name: str, folder: Path) -> None:
    model, labelled = network(name), support(8)
    adapted = fewshift.adapt(model, None, unlabelled=labelled.images, method="adabn", accept="always", preprocess=STEPS)
    base = fewshift.export(model, folder / "base.onnx", preprocess=STEPS).path
    own = fewshift.export(adapted, folder / "own.onnx").path
    began = time.perf_counter()
    site = fewshift.export(adapted, folder / "camera-7.site", base=base)
    making = time.perf_counter() - began
    plain, again, switched = plain_session(own), plain_session(own), Session(base, threads=1)
    switched.switch(site.path)
    for count, rounds in ROUNDS.items():
        images = np.random.default_rng(0).normal(size=(count, 3, 224, 224)).astype(np.float32)
        feed = {"images": images}
        seconds = fastest(
            rounds,
            plain=partial(plain.run, None, feed),
            again=partial(again.run, None, feed),
            switched=partial(switched.run, images),
        )
        show(f"{name}: batch of {count}, switched / plain session", seconds["switched"] / seconds["plain"], "<= 1.03")
        show(f"{name}: batch of {count}, two plain sessions (noise)", seconds["again"] / seconds["plain"], "= 1.00")
    seconds = fastest(
        OPENINGS,
        plain=lambda: plain_session(own),
        base=lambda: Session(base, threads=1),
        switch=lambda: switched.switch(site.path),
    )
    show(f"{name}: switching / opening the base", seconds["switch"] / seconds["base"], "<= 1.25")
    show(f"{name}: switching / opening a plain session", seconds["switch"] / seconds["plain"], "<= 2")
    milliseconds = f"switch {1000 * seconds['switch']:.0f} ms, plain session {1000 * seconds['plain']:.0f} ms"
    print(f"  {milliseconds}; making and comparing the site {making:.1f} s; site {site.nbytes / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
