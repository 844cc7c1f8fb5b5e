"""What `adapt_sites` hands back: a row for every place, a table and a page; what needs attention comes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fewshift.core._display import Displayed
from fewshift.core.method import Method
from fewshift.report import figures, prose
from fewshift.report.recommendation import Advice
from fewshift.trust.gain import LEVEL

FAILED = "failed"
VERDICTS = (FAILED, Advice.AGAINST.value, Advice.CAUTION.value, Advice.RECOMMENDED.value)  # the urgent first
NOTHING_MORE = "deploy"  # a recommendation that asks for nothing else
PICTURED = 40  # places in a figure


class PlaceGain(NamedTuple):
    """The change in points of accuracy, and its interval."""

    point: float
    low: float
    high: float


@dataclass(frozen=True)
class PlaceRow:
    """One place: the verdict, what it rests on, and what to do."""

    place: str
    verdict: str
    images: int | None = None
    gain: PlaceGain | None = None
    shift: float | None = None  # the score of the images before adaptation
    shifted: bool = False
    note: str = ""
    delta: Path | None = None
    fresh: bool = False  # it was adapted to in this run
    seconds: float = 0.0

    def urgency(self) -> tuple[int, float, str]:
        """What needs attention first: by verdict, then by the gain that is the least certain to be one."""
        return VERDICTS.index(self.verdict), 0.0 if self.gain is None else self.gain.low, self.place


def row_of(place: str, record: Mapping[str, Any], delta: Path, *, fresh: bool) -> PlaceRow:
    """The row of a record: its result, or its error."""
    row = PlaceRow(place, FAILED, fresh=fresh, seconds=record.get("seconds", 0.0))
    if "error" in record:
        return replace(row, note=record["error"])
    result = record["result"]
    gain, shift, (_, _, step) = result["gain"], result["shift"], result["recommendation"]
    suspects = prose.counted(result["suspects"], "label")
    notes = [
        *([] if step == NOTHING_MORE else [step]),
        *result["warnings"],
        *([f"{suspects} to check"] if result["suspects"] and suspects not in step else []),
    ]
    return replace(
        row,
        verdict=result["advice"],
        images=result["images"],
        gain=None if gain is None else PlaceGain(gain["point"], gain["low"], gain["high"]),
        shift=None if shift is None else shift["score"],
        shifted=shift is not None and shift["shifted"],
        note="; ".join(notes),
        delta=delta if result["accepted"] else None,
    )


@dataclass(frozen=True, repr=False)
class Fleet(Displayed):
    """One network and many places."""

    rows: tuple[PlaceRow, ...]  # what needs attention first
    folder: Path  # of the deltas
    places: Path
    network: str
    method: Method
    seed: int
    seconds: float

    @property
    def counts(self) -> dict[str, int]:
        """How many places have each verdict, the urgent first."""
        counted = Counter(row.verdict for row in self.rows)
        return {verdict: counted[verdict] for verdict in VERDICTS if counted[verdict]}

    @property
    def failed(self) -> tuple[PlaceRow, ...]:
        """The places that could not be adapted to."""
        return tuple(row for row in self.rows if row.verdict == FAILED)

    @property
    def rejected(self) -> tuple[PlaceRow, ...]:
        """The places where the source network is kept."""
        return tuple(row for row in self.rows if row.verdict == Advice.AGAINST.value)

    @property
    def title(self) -> str:
        """How many places, and of which network."""
        return f"{prose.counted(len(self.rows), 'place')} for {self.network}"

    @property
    def facts(self) -> dict[str, str]:
        """The verdicts, and where the deltas are."""
        return {"verdicts": self.words, "deltas": str(self.folder), "more": "rows, table(), report(file)"}

    @property
    def words(self) -> str:
        """The verdicts in one line."""
        return ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items())

    @property
    def fresh(self) -> int:
        """How many places were adapted to in this run."""
        return sum(row.fresh for row in self.rows)

    def table(self) -> list[dict[str, str]]:
        """One row for each place, as words; numbers are in `rows` and `to_json`."""
        return [_cells(row) for row in self.rows]

    def picture(self) -> str:
        """The gains with their intervals as one SVG; empty where there are none, or too many to read."""
        gains = {row.place: row.gain for row in self.rows if row.gain is not None}
        if not 0 < len(gains) <= PICTURED:
            return ""
        spoken = "; ".join(f"{place}: {gain.point:+.1f}" for place, gain in gains.items())
        return figures.gains(
            dict(gains),
            label="gain over the source, points of accuracy",
            key="gains",
            alt=f"Gain over the source network at each place, in points. {spoken}.",
        )

    def report(self, path: str | Path) -> Path:
        """Write one self-contained HTML page: verdicts, the table, a picture."""
        from fewshift.report.pages import fleet_page

        return fleet_page(self, path)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON knows it."""
        rows = [asdict(row) | {"gain": row.gain and row.gain._asdict(), "delta": row.delta and str(row.delta)}
                for row in self.rows]  # fmt: skip
        origin = {"network": self.network, "method": self.method.name, "seed": self.seed, "seconds": self.seconds}
        return {"folder": str(self.folder), "counts": self.counts, "rows": rows, **origin}


def _cells(row: PlaceRow) -> dict[str, str]:
    gain = row.gain
    return {
        "place": row.place,
        "verdict": row.verdict,
        "images": "-" if row.images is None else str(row.images),
        "gain": "-" if gain is None else f"{gain.point:+.1f}",
        f"{100 * LEVEL:.0f} % interval": "-" if gain is None else f"{gain.low:+.1f} to {gain.high:+.1f}",
        "shift": "-" if row.shift is None else f"{row.shift:.1f} {'alarm' if row.shifted else 'no alarm'}",
        "note": row.note,
    }
