"""What methods and training algorithms say about how they were verified is true of the tests that they name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fewshift.lab.training import ALGORITHMS
from fewshift.methods.catalog import METHODS, markdown
from tests.helpers.naive import TOLERANCE

ROOT = Path(__file__).parents[1]
KINDS = METHODS | ALGORITHMS
each_kind = pytest.mark.parametrize("name", KINDS)


def texts_of(name: str) -> list[str]:
    """The texts of the tests that it names."""
    return [(ROOT / file).read_text(encoding="utf-8") for file in re.findall(r"`([\w/]+\.py)`", KINDS[name].verified)]


@each_kind
def test_it_names_tests_and_the_first_is_about_it(name):
    assert "verified" in vars(KINDS[name]), "each has words of its own"
    first = texts_of(name)[0]
    about = {"blend-head": "MixedHead", "ibn": "InstanceBatchNorm"}.get(name, KINDS[name].__name__)
    assert about in first or f'"{name}"' in first


@each_kind
def test_the_tolerance_it_names_is_that_of_a_test(name):
    texts = texts_of(name)
    for figure in re.findall(r"\b1e-\d+", KINDS[name].verified):
        shared = float(figure) == TOLERANCE and any("from tests.helpers.naive import" in text for text in texts)
        assert shared or any(re.search(rf"\b{figure}\b", text) for text in texts)


NAIVE = sorted(path for path in ROOT.glob("tests/**/test_*_naive.py") if "Formulas" in path.read_text(encoding="utf-8"))
KNOWN = {kind.__name__ for kind in KINDS.values()}
ORDER = {"balanced_minibatches"}  # of the images
ASKED = {"Target", "Unlabelled", "centroid_loss"}


@pytest.mark.parametrize("path", NAIVE, ids=lambda path: path.stem)
def test_a_second_implementation_imports_methods_to_compare_with_and_the_order_of_images_alone(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imports if (node.module or "").startswith("fewshift") for alias in node.names}
    assert names <= KNOWN | ORDER | ASKED


def test_both_pages_say_how_each_was_verified():
    training = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert all(f"Verified: {method.verified}." in markdown() for method in METHODS.values())
    assert all(f"| `{name}` | {algorithm.verified} |" in training for name, algorithm in ALGORITHMS.items())
