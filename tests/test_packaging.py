"""What is installed: a version, and every file that the package reads at run time."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import fewshift

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fewshift"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_every_file_that_is_not_python_is_package_data() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["fewshift"]
    listed = {path for pattern in patterns for path in PACKAGE.glob(pattern) if path.is_file()}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in files if path.suffix != ".py"} == listed
    assert all(any(PACKAGE.glob(pattern)) for pattern in patterns)
    assert {"py.typed", "page.html", "smoke.toml", "digits-mnist.safetensors"} <= {path.name for path in listed}


def test_every_folder_with_python_is_a_package() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_version_is_the_installed_one() -> None:
    assert fewshift.__version__ == version("fewshift")
    assert re.match(r"\d+\.\d+", fewshift.__version__)


def test_public_names_can_be_imported() -> None:
    assert all(getattr(fewshift, name) is not None for name in fewshift.__all__)


def test_what_only_the_demo_needs_is_no_dependency_and_nothing_pins_torch() -> None:
    required = {re.split(r"[<>=~!\[; ]", line)[0]: line for line in PROJECT["project"]["dependencies"]}
    assert not required.keys() & {"scikit-learn", "mlxtend"}
    assert not re.search("==|<|~=", required["torch"])


def test_nothing_imports_what_only_the_demo_needs_before_it_is_used() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in ("sklearn", "mlxtend")], path


def test_the_citation_names_the_licence_and_the_paper_of_the_readme() -> None:
    citation, readme = ((ROOT / name).read_text("utf-8") for name in ("CITATION.cff", "README.md"))
    assert f"license: {PROJECT['project']['license']}" in citation
    url = re.search(r"url: (\S+)", citation)
    assert url
    assert url[1] in readme
