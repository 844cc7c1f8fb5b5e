"""Tables: means with spread and n, marks that mean something, three formats."""

from __future__ import annotations

import csv
import math
import statistics
from dataclasses import replace

import pytest

from fewshift.report.tables import Entry, Line, Table, comma_separated, is_ahead, latex, markdown, plain, with_average


def entry(*values: float, paper: float | None = None) -> Entry:
    return Entry(dict(enumerate(values)), paper)


TABLE = Table(
    "Toy & more",
    "accuracy in %",
    "Settings fixed per method.",
    ("art", "photo"),
    (
        Line("source", None, "any", (entry(50, 52, 54, paper=51.0), entry(90, 91, 92, paper=92.0))),
        Line("a_b", 5, "batch 8", (entry(60, 63, 66), entry(91, 89, 93))),
        Line("lccs", 5, "any", (entry(70, 72, 74, paper=80.0), entry(91, 90, 95, paper=97.0))),
        Line("missing", 1, "any", (entry(), entry())),
    ),
)


def test_an_entry_tells_mean_spread_and_n_with_the_papers_value_beside():
    values = [50, 52, 54]
    assert entry(*values, paper=51.0).text() == f"52.0 ± {statistics.pstdev(values):.1f} (3) [51.0]"
    assert entry().text() == "-"
    assert math.isnan(entry().mean)


def test_ahead_means_by_more_than_the_standard_error_of_the_paired_difference():
    assert is_ahead(entry(70, 72, 74), entry(60, 63, 66))
    assert not is_ahead(entry(91, 89, 93), entry(90, 91, 92))  # +1, -2, +1
    assert not is_ahead(entry(70), entry(10))  # one seed is no evidence
    paired = is_ahead(entry(10, 50, 90), entry(9, 49, 89.5))  # large spread, but always ahead
    assert paired


def test_marks_stop_where_the_order_is_not_certain():
    assert TABLE.marks(0) == {2: "best", 1: "second"}
    assert TABLE.marks(1) == {}


def test_lines_with_other_test_images_are_not_ranked_together():
    first, *rest = TABLE.lines
    apart = replace(TABLE, lines=(first, *(replace(line, among="long tail") for line in rest)))
    assert apart.marks(0) == {2: "best"}  # alone, the first has nobody to be ahead of
    assert replace(TABLE, ranked=False).marks(0) == {}


def test_columns_that_say_nothing_are_left_out_and_labels_cannot_break_a_table():
    odd = Table("T", "m", "r", ("a|b",), (Line("x|y <b> *z*\n\\cmd^2", None, "", (entry(1, 2, paper=3.0),)),))
    head, _, line = markdown(odd).strip().splitlines()[-3:]
    assert head == r"| method | a\|b |"
    assert line == r"| x\|y &lt;b> \*z\* \\cmd^2 | 1.5 ± 0.5 (2) [3.0] |"
    body = latex(odd)
    assert r"x\textbar{}y \textless{}b\textgreater{} *z* \textbackslash{}cmd\textasciicircum{}2" in body


def test_json_has_every_number_with_its_seed():
    entries = plain(TABLE)["lines"][2]["entries"]["art"]
    assert entries["values"] == {"0": 70, "1": 72, "2": 74}
    assert (entries["mean"], entries["n"], entries["paper"], entries["mark"]) == (72, 3, 80.0, "best")


def test_the_average_is_taken_within_each_seed_first():
    averaged = with_average(TABLE)
    assert averaged.columns[-1] == "average"
    assert list(averaged.lines[0].entries[-1].values.values()) == [70, 71.5, 73]
    assert averaged.lines[0].entries[-1].paper == pytest.approx(71.5)
    assert averaged.lines[1].entries[-1].paper is None


def test_markdown_has_the_rule_in_its_header_and_marks_the_best():
    text = markdown(TABLE)
    assert "Settings fixed per method." in text
    assert "**72.0 ± 1.6 (3) [80.0]**" in text
    assert "_63.0 ± 2.4 (3)_" in text


def test_csv_keeps_every_value():
    rows = list(csv.DictReader(comma_separated(TABLE).splitlines()))
    assert len(rows) == 8
    assert rows[0]["values"] == "50.0000 52.0000 54.0000"
    assert rows[0]["n"] == "3"


def test_latex_escapes_and_balances():
    text = latex(TABLE)
    assert r"a\_b" in text
    assert r"\textbf{72.0 $\pm$ 1.6 (3) [80.0]}" in text
    assert text.count("{") == text.count("}")
    assert all(line.count(" & ") == 4 for line in text.splitlines() if line.endswith(r"\\"))
