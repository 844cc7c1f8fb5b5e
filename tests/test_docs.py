"""The documentation holds together: every relative link leads to a file, every anchor to a heading."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(text: str) -> str:
    """A page without its code."""
    text = re.sub(r"(?ms)^( *)```.*?^\1```$", "", text)
    return re.sub(r"`[^`\n]*`", "code", text)


def links(text: str) -> list[str]:
    return [link for link in LINK.findall(prose(text)) if not re.match(r"[a-z]+:", link)]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to headings: lower case, punctuation gone, hyphens for spaces, repeats numbered."""
    text = re.sub(r"(?ms)^( *)```.*?^\1```$", "", text)
    seen: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"(?m)^#{1,6} (.+?)\s*$", text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
        seen[slug] = seen.get(slug, 0) + 1
    return found


@cache
def read(path: Path) -> str:
    return path.read_text("utf-8")


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    problems = []
    for link in links(read(page)):
        file, _, anchor = unquote(link).partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or ROOT not in target.parents:
            problems.append(f"{page.relative_to(ROOT)}: {link} is no file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(read(target)):
            problems.append(f"{page.relative_to(ROOT)}: {link} has no such heading")
    return problems


def test_every_relative_link_leads_to_a_file_and_a_heading():
    assert len(PAGES) > 15
    assert sum(len(links(read(page))) for page in PAGES) > 50
    assert [problem for page in PAGES for problem in broken(page)] == []


def test_every_page_of_results_is_linked_from_the_conclusions():
    results = ROOT / "docs" / "results.md"
    linked = {(results.parent / link.partition("#")[0]).resolve() for link in links(read(results))}
    assert set((ROOT / "docs" / "results").glob("*.md")) - linked == set()


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("## 8. Trust", "8-trust"),
        ("# Labels for pixels: CamVid, day to dusk", "labels-for-pixels-camvid-day-to-dusk"),
        ("### `auto` and *you*", "auto-and-you"),
        ("## art_painting", "art_painting"),
    ],
)
def test_anchors_are_those_of_github(heading, anchor):
    assert anchors(f"text\n\n{heading}\n\ntext") == {anchor}


def test_repeated_headings_are_numbered_and_code_has_none():
    assert anchors("# A\n\n# A\n\n```\n# B\n```\n") == {"a", "a-1"}
    assert links("[a](b.md) `[c](d.md)` ![e](f.png) [g](https://example.org)") == ["b.md", "f.png"]
