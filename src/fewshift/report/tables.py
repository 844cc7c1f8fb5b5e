"""Tables from records: pure functions. No entry is a bare mean: spread and n always come with it."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Entry:
    """The values of one row on one target by seed, and the paper's value where it prints one."""

    values: Mapping[int, float]
    paper: float | None = None

    @property
    def n(self) -> int:
        """How many seeds."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """Over the seeds; NaN if there is none."""
        return statistics.fmean(self.values.values()) if self.values else math.nan

    @property
    def spread(self) -> float:
        """Population standard deviation over the seeds, as the paper's."""
        return statistics.pstdev(self.values.values()) if self.values else math.nan

    def text(self, digits: int = 1) -> str:
        """mean ± spread (n), and the paper's value."""
        beside = "" if self.paper is None else f" [{self.paper:.{digits}f}]"
        if not self.values:
            return f"-{beside}"
        return f"{self.mean:.{digits}f} ± {self.spread:.{digits}f} ({self.n}){beside}"


@dataclass(frozen=True)
class Line:
    """One line of a table: its label, its shots, and an entry per column."""

    label: str
    shots: int | None
    condition: str
    entries: tuple[Entry, ...]
    printed_average: float | None = None  # the paper's own
    among: str = ""  # lines with the same word here have the same test images, and are ranked together


@dataclass(frozen=True)
class Table:
    """A grid's results. The header says what the numbers are and how settings were chosen."""

    title: str
    metric: str
    rule: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    ranked: bool = True  # whether the largest is the best and gets a mark
    digits: int = 1  # after the point

    def marks(self, column: int) -> dict[int, str]:
        """Which lines are best and second in a column, where the paired difference exceeds its standard error.

        Lines are ranked among those with the same test images.
        """
        if not self.ranked:
            return {}
        groups = dict.fromkeys(line.among for line in self.lines)
        return {index: mark for group in groups for index, mark in self._marks_among(group, column).items()}

    def _marks_among(self, group: str, column: int) -> dict[int, str]:
        ranked = sorted(
            (index for index, line in enumerate(self.lines) if line.among == group and line.entries[column].values),
            key=lambda index: -self.lines[index].entries[column].mean,
        )
        marks: dict[int, str] = {}
        for place, mark in enumerate(("best", "second")):
            if place + 1 >= len(ranked):
                break
            ahead, behind = (self.lines[ranked[place + step]].entries[column] for step in (0, 1))
            if not is_ahead(ahead, behind):
                break
            marks[ranked[place]] = mark
        return marks


@dataclass(frozen=True)
class Listing:
    """A table of words, with a header that explains it and sentences that follow from it."""

    title: str
    header: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    sentences: tuple[str, ...] = ()


def is_ahead(first: Entry, second: Entry) -> bool:
    """Whether the mean paired difference over the seeds both have is larger than its standard error."""
    shared = sorted(first.values.keys() & second.values.keys())
    gaps = [first.values[seed] - second.values[seed] for seed in shared]
    if len(gaps) < 2:
        return False
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return statistics.fmean(gaps) > error


def with_average(table: Table) -> Table:
    """The table with a last column: the average of the others, where there are several."""
    if len(table.columns) < 2:
        return table
    lines = tuple(replace(line, entries=(*line.entries, average_of(line))) for line in table.lines)
    return replace(table, columns=(*table.columns, "average"), lines=lines)


def average_of(line: Line) -> Entry:
    """The mean over the entries within each seed that all of them have.

    The paper's value beside it is the one it prints, or the mean of its entries where it prints none.
    """
    seeds = set.intersection(*(set(entry.values) for entry in line.entries)) if line.entries else set()
    means = {seed: statistics.fmean(entry.values[seed] for entry in line.entries) for seed in sorted(seeds)}
    printed = line.printed_average if line.printed_average is not None else _mean_of_papers(line.entries)
    return Entry(means, printed)


def markdown(table: Table) -> str:
    """A heading, and a pipe table with its header; best in bold, second in italics."""
    return f"### {_cell(table.title)}\n\n{untitled_markdown(table)}"


def untitled_markdown(table: Table) -> str:
    """The same without the heading."""
    return _pipes(_header(table), _rows(table, _cell, {"best": "**{}**", "second": "_{}_"}))


def listing_markdown(listing: Listing) -> str:
    """A heading, a pipe table with its header, and beneath it the sentences."""
    return f"### {_cell(listing.title)}\n\n{untitled_listing(listing)}"


def untitled_listing(listing: Listing) -> str:
    """The same without the heading."""
    rows = [list(map(_cell, line)) for line in (listing.columns, *listing.lines)]
    sentences = "".join(f"\n- {_cell(sentence)}" for sentence in listing.sentences)
    return _pipes(listing.header, rows) + sentences + "\n" * bool(sentences)


def latex(table: Table) -> str:
    """A booktabs table; best in bold, second underlined."""
    rows = _rows(table, _escape, {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}"})
    return _booktabs([_header(table)], "l" * len(_leading(table)) + "c" * len(table.columns), rows)


def listing_latex(listing: Listing) -> str:
    """A booktabs table; the sentences are comments."""
    rows = [list(map(_escape, line)) for line in (listing.columns, *listing.lines)]
    return _booktabs([listing.header, *listing.sentences], "l" + "c" * (len(listing.columns) - 1), rows)


def _rows(table: Table, escape: Callable[[str], str], wraps: Mapping[str, str]) -> list[list[str]]:
    """The head and the lines of a table, escaped and marked."""
    names, leading = zip(*_leading(table), strict=True)
    marks = [table.marks(column) for column in range(len(table.columns))]
    rows = [list(map(escape, (*names, *table.columns)))]
    for index, line in enumerate(table.lines):
        forms = [wraps.get(column.get(index, ""), "{}") for column in marks]
        numbers = [escape(entry.text(table.digits)) for entry in line.entries]
        rows.append([escape(tell(line)) for tell in leading] + list(map(str.format, forms, numbers)))
    return rows


def _pipes(header: str, rows: Sequence[Sequence[str]]) -> str:
    head, *lines = ("| " + " | ".join(row) + " |" for row in rows)
    return f"{header}\n\n" + "\n".join([head, "|" + "---|" * len(rows[0]), *lines]) + "\n"


def _booktabs(notes: Sequence[str], columns: str, rows: Sequence[Sequence[str]]) -> str:
    head, *lines = (" & ".join(row) + r" \\" for row in rows)
    body = "\n".join([r"\toprule", head, r"\midrule", *lines, r"\bottomrule"])
    comments = "".join(f"% {' '.join(note.split())}\n" for note in notes)
    return f"{comments}\\begin{{tabular}}{{{columns}}}\n{body}\n\\end{{tabular}}\n"


def comma_separated(table: Table) -> str:
    """One line per entry, with all its numbers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "k", "condition", "target", "mean", "spread", "n", "paper", "seeds", "values"])
    for line in table.lines:
        for column, entry in zip(table.columns, line.entries, strict=True):
            values = " ".join(f"{value:.4f}" for value in entry.values.values())
            seeds = " ".join(map(str, entry.values))
            numbers: list[Any] = [f"{entry.mean:.4f}", f"{entry.spread:.4f}", entry.n, entry.paper, seeds, values]
            writer.writerow([line.label, line.shots, line.condition, column, *numbers])
    return text.getvalue()


def plain(table: Table) -> dict[str, Any]:
    """The table as numbers and words, ready for JSON."""
    marks = [table.marks(column) for column in range(len(table.columns))]
    lines = [
        {
            "method": line.label,
            "k": line.shots,
            "condition": line.condition,
            "entries": {
                column: {
                    "mean": entry.mean if entry.values else None,
                    "spread": entry.spread if entry.values else None,
                    "n": entry.n,
                    "values": {str(seed): value for seed, value in entry.values.items()},
                    "paper": entry.paper,
                    "mark": marks[place].get(index),
                }
                for place, (column, entry) in enumerate(zip(table.columns, line.entries, strict=True))
            },
        }
        for index, line in enumerate(table.lines)
    ]
    return {"title": table.title, "metric": table.metric, "rule": table.rule, "lines": lines}


def _header(table: Table) -> str:
    return f"{table.metric}, mean ± population standard deviation (n seeds) [paper]. {table.rule}"


def _leading(table: Table) -> list[tuple[str, Callable[[Line], str]]]:
    """The columns before the numbers: shots and conditions only where some line has them."""
    columns: list[tuple[str, Callable[[Line], str]]] = [("method", lambda line: line.label)]
    if any(line.shots is not None for line in table.lines):
        columns.append(("k", lambda line: "-" if line.shots is None else str(line.shots)))
    if any(line.condition for line in table.lines):
        columns.append(("condition", lambda line: line.condition))
    return columns


def _cell(text: str) -> str:
    """Text, escaped for a pipe table."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "|*_`\\" else letter for letter in plain)


def _mean_of_papers(entries: Sequence[Entry]) -> float | None:
    values = [entry.paper for entry in entries if entry.paper is not None]
    return statistics.fmean(values) if len(values) == len(entries) else None


LATEX = {
    **{letter: rf"\{letter}" for letter in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "\n": " ",
    "±": r"$\pm$",
}


def _escape(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)
