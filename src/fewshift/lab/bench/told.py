"""What was run, in the words that pages and figures of the documentation share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from fewshift.lab.datasets.catalog import COLLECTIONS


def dataset_title(name: str) -> str:
    """What a data set is called; its short name where the catalog does not have it."""
    return COLLECTIONS[name].title if name in COLLECTIONS else name


def span(numbers: Collection[int], one: str) -> str:
    """Numbers that may differ, and what they count: "3 draws", "500 to 1,000 images"."""
    least, most = min(numbers, default=0), max(numbers, default=0)
    count = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return f"{count} {one if most == 1 else one + 's'}"


def networks_in(results: Iterable[Mapping[str, Any]]) -> str:
    """The networks of results, each kind once; nothing where no record knows."""
    kinds = {_network_words(result["network"]) for result in results if result.get("network")}
    return " and ".join(sorted(kinds))


def _network_words(facts: Mapping[str, Any]) -> str:
    pixels = f"{facts['pixels']} px" if "pixels" in facts else ""
    return ", ".join(filter(None, [facts.get("arch", ""), facts.get("algorithm", ""), pixels]))
