"""Adapt one network to many places: resumable, in several processes or on Ray; a place that fails stops no other."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from fewshift.core._files import refuse_long_name
from fewshift.core._progress import Progress, silent, told_to
from fewshift.core.delta import Fingerprint
from fewshift.core.labels import Augment
from fewshift.core.losses import Loss
from fewshift.core.method import Method, Needs
from fewshift.errors import FewshiftError
from fewshift.fleet.places import Place, common_classes, named, paths_below
from fewshift.fleet.work import Crate, Work, adapt_place, at_hand, delta_file, is_place_record, unpack
from fewshift.images.inputs import Steps
from fewshift.jobs.ledger import Ledger, Record, alone_in
from fewshift.jobs.sweep import WorkPlan, check_engine, missing, sweep
from fewshift.methods.catalog import method_of, sized
from fewshift.models.cards import known_card
from fewshift.opening import steps_for
from fewshift.report.fleet import Fleet, PlaceRow, row_of
from fewshift.trust.guard import Accept, check_accept
from fewshift.trust.held_out import INSIDE

LOST = {"error": "its record was lost: run it again"}
LEDGER = ".fleet"  # the folder in the folder of deltas that remembers what was done


class AdaptOptions(TypedDict, total=False):
    """Options of `fewshift.adapt` that hold for every place."""

    method: str | Method
    shots: int | None
    loss: Loss | None
    preprocess: Steps
    augment: Augment | None
    classes: Sequence[str] | None
    head: str | None
    validate: str | None
    accept: Accept
    size: str | None
    drop_suspects: bool
    check: bool
    seed: int
    device: torch.device | str | None


def adapt_sites(
    model: nn.Module,
    places: str | Path,
    out: str | Path,
    *,
    workers: int = 1,
    engine: str = "local",
    address: str | None = None,
    progress: Progress = None,
    **options: Unpack[AdaptOptions],
) -> Fleet:
    """Fit `model` to every place below the folder `places`, each with the labelled images in it.

    A place is a folder as `adapt` takes it, such as places/camera-7/cat/1.jpg, or a CSV or JSON file with labels.
    Options are those of `adapt`. Without `classes`, and where the network's card has none, the class folders that most
    places have are the network's outputs, in alphabetical order: a place may lack some. The delta of an accepted place
    becomes out/camera-7.safetensors; a rejected place has none. Call it again to continue: places that are done are
    left alone while network, options and images are the same.

    `workers` processes share the work, or with `engine="ray"` the Ray cluster at `address` (a local one by default),
    whose nodes have to see both folders. Each loads the network once. One that dies is replaced; a place in which
    three died has failed, and so has one with images that cannot be read. The others go on.
    """
    began = time.perf_counter()
    _check(workers, engine, address, options)
    folder = Path(out).absolute()
    paths = paths_below(places)
    for name in paths:
        refuse_long_name(delta_file(folder, name))
    if options.get("classes") is None and known_card(model).classes is None:
        options["classes"] = common_classes(paths.values())
    settings = _settings(model, options)
    jobs = named(paths, settings)
    plan = _plan(Work(model, dict(options), folder), settings, travels=workers > 1 or engine == "ray")
    told: set[str] = set()
    with alone_in(folder), told_to(progress) as listener:
        ledger = Ledger(folder / LEDGER, finished=lambda record: _is_done(record, folder), shape=is_place_record)
        to_do = missing(jobs, ledger)

        def tell(record: Record) -> None:
            told.add(record["key"])
            if listener is not None:
                listener("places", len(told), len(to_do))

        with silent():
            sweep(to_do, ledger, plan, workers=workers, tell=tell, engine=engine, address=address)
        records = ledger.read()
        rows = [
            _row(place, records.get(place.key, LOST), folder, Path(places), fresh=place.key in told) for place in jobs
        ]
    return Fleet(
        rows=tuple(sorted(rows, key=PlaceRow.urgency)),
        folder=Path(out),
        places=Path(places),
        network=known_card(model).arch or type(model).__name__,
        method=sized(method_of(options.get("method", "auto")), options.get("size")),
        seed=options.get("seed", 0),
        seconds=time.perf_counter() - began,
    )


def _plan(work: Work, settings: str, *, travels: bool) -> WorkPlan:
    if not travels:
        return WorkPlan(at_hand, (work,), adapt_place, "place")
    key = hashlib.sha256(f"{settings} {work.out}".encode()).hexdigest()
    return WorkPlan(unpack, (Crate.of(work, key),), adapt_place, "place")


def _check(workers: int, engine: str, address: str | None, options: AdaptOptions) -> None:
    """One sentence about what can be known before any place is adapted to."""
    check_engine(engine, address)
    if not isinstance(workers, int) or workers < 1:
        raise FewshiftError(f"workers={workers!r} is no number of processes: give 1, 2, ...")
    if unknown := sorted(set(options) - set(AdaptOptions.__annotations__)):
        raise FewshiftError(
            f"{', '.join(unknown)} cannot be the same for every place: use only "
            f"{', '.join(AdaptOptions.__annotations__)}"
        )
    validate = options.get("validate", "cv")
    if validate is not None and validate not in INSIDE:
        raise FewshiftError(f"validate={validate!r} is for one place: choose 'cv', 'loo' or None")
    check_accept(options.get("accept", "not-worse"))
    method = sized(method_of(options.get("method", "auto")), options.get("size"))
    if method.needs in (Needs.STREAM, Needs.UNLABELLED):
        raise FewshiftError(f"{method.name} does not learn from labelled images of a place: choose another method")
    if not method.plain:
        raise FewshiftError(f"{method.name} returns a {method.returns}, which has no delta: choose another method")


def _settings(model: nn.Module, options: AdaptOptions) -> str:
    """Everything that the result of a place depends on, except its images, as text."""
    method = sized(method_of(options.get("method", "auto")), options.get("size"))
    known = {name: value for name, value in options.items() if name not in ("method", "size", "device")}
    known |= {
        "network": vars(Fingerprint.of(model)),
        "method": [method.name, method.settings()],
        "preprocess": steps_for(model, options.get("preprocess")),
        "classes": list(options.get("classes") or known_card(model).classes or []),
    }
    return json.dumps(
        {name: value for name, value in known.items() if value is not None}, sort_keys=True, default=_word
    )


def _word(value: Any) -> str:
    """A value that JSON does not know, as text that is the same in every process."""
    function = getattr(value, "function", value)
    name = getattr(function, "__qualname__", None)
    return repr(value) if name is None else f"{function.__module__}.{name}"


def _is_done(record: Record, folder: Path) -> bool:
    """Whether a place has a result, and its delta is where it was written."""
    size = record.get("result", {"delta": -1})["delta"]
    if size is None:
        return True
    file = delta_file(folder, record["place"]["name"])
    return file.is_file() and file.stat().st_size == size


def _row(place: Place, record: Record, folder: Path, places: Path, *, fresh: bool) -> PlaceRow:
    """The newest record of a place as a row; a delta that a worker wrote has to be visible here."""
    file = delta_file(folder, place.name)
    if not ("error" in record or _is_done(record, folder)):
        record = {"error": f"its delta is not in {folder}: choose a folder that this machine and every worker see"}
    if "error" not in record:
        return row_of(place.name, record, file, fresh=fresh)
    error = record["error"].replace(str(places.absolute()), str(places))  # workers have other working folders
    left = "; the delta of an earlier run is still there" if file.exists() else ""
    return row_of(place.name, record | {"error": error + left}, file, fresh=fresh)
