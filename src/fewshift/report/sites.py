"""A folder of sites as a table: what each delta is, and whether it still fits the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fewshift.core._display import Displayed, byte_size
from fewshift.deploy.site_folder import Fit, SiteFacts, site_facts
from fewshift.report.prose import counted

FITS = {None: "-", True: "yes", False: "no"}
VERDICTS = {None: "-", True: "yes", False: "no"}


@dataclass(frozen=True, repr=False)
class SiteTable(Displayed):
    """The sites of a folder, in alphabetical order; files that cannot be used are among them."""

    folder: Path
    sites: tuple[SiteFacts, ...]
    network: str | None = None  # that they were compared with

    @property
    def title(self) -> str:
        """How many there are, and how many of them fit."""
        count = f"{counted(len(self.sites), 'site')} in {self.folder}"
        if self.network is None:
            return count
        return f"{count}, {Counter(site.fits for site in self.sites)[True]} of them fit the {self.network}"

    @property
    def facts(self) -> dict[str, str]:
        """A line for each site."""
        return {row.pop("site"): _line(row) for row in self.table()} | self.problems

    @property
    def problems(self) -> dict[str, str]:
        """Why sites cannot be used, by their names."""
        return {site.name: site.problem for site in self.sites if site.problem is not None}

    def table(self) -> list[dict[str, str]]:
        """One row for each site, as words; values are in `sites` and `to_json`."""
        return [_cells(site) for site in self.sites]

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON knows it."""
        return {
            "folder": str(self.folder),
            "network": self.network,
            "sites": [
                {
                    "site": site.name,
                    "file": str(site.file),
                    "method": site.method,
                    "chosen": site.chosen,
                    "k": site.shots,
                    "gain": site.gain,
                    "accepted": site.accepted,
                    "classes": site.classes,
                    "file_date": site.date.isoformat(),
                    "file_bytes": site.bytes,
                    "fits": site.fits,
                    "problem": site.problem,
                }
                for site in self.sites
            ],
        }


def list_sites(
    folder: str | Path, model: nn.Module | None = None, *, classes: Sequence[str] | None = None
) -> SiteTable:
    """What the deltas of a folder say about themselves: method, k, gain, verdict, date and size.

    With the network, also whether each fits it: made for these weights, and for `classes` if they are known (from here
    or from the network's card). Without it, that is not known, and a file that is no whole delta does not fit anyhow.
    """
    fit = None if model is None else Fit.to(model, classes)
    facts = site_facts(folder, fit)
    return SiteTable(Path(folder), facts, None if model is None else type(model).__name__)


def _cells(site: SiteFacts) -> dict[str, str]:
    gain, method = site.gain, site.method or "-"
    return {
        "site": site.name,
        "method": f"{method}: {site.chosen}" if site.chosen else method,
        "k": "-" if site.shots is None else str(site.shots),
        "gain": "-" if gain is None else f"{gain['point']:+.1f}",
        "interval": "-" if gain is None else f"{gain['low']:+.1f} to {gain['high']:+.1f}",
        "accepted": VERDICTS[site.accepted],
        "date": f"{site.date:%Y-%m-%d %H:%M}",
        "size": byte_size(site.bytes),
        "fits": FITS[site.fits],
    }


def _line(row: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.items() if value != "-")
