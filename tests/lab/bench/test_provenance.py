"""A record says which code and which network made it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fewshift.images.preprocess import Preprocess
from fewshift.lab.bench import provenance
from fewshift.lab.bench.provenance import commit, network_facts, versions
from fewshift.lab.bench.run import run
from fewshift.models.cards import Card, with_card
from tests.helpers.bench import CELL, tiny_materials
from tests.helpers.networks import make_tiny


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in a checkout with one commit."""
    folder = tmp_path / "src" / "thing"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (tmp_path / "README.md").write_text("")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "one")
    return folder


def test_the_commit_is_that_of_the_checkout(package):
    assert commit(package) == git(package, "rev-parse", "--short", "HEAD")


def test_a_changed_package_is_told_and_a_changed_neighbour_is_not(package):
    (package.parents[1] / "README.md").write_text("changed")
    assert not str(commit(package)).endswith("-dirty")
    commit.cache_clear()
    (package / "__init__.py").write_text("changed = True")
    assert commit(package) == git(package, "rev-parse", "--short", "HEAD") + "-dirty"


def test_a_package_installed_inside_another_checkout_has_no_commit(package):
    installed = package.parents[1] / ".venv" / "fewshift"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert commit(installed) is None


def test_no_checkout_and_no_git_are_no_error(tmp_path, monkeypatch):
    assert commit(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    commit.cache_clear()
    assert commit(provenance.PACKAGE) is None
    commit.cache_clear()


def test_git_is_asked_once(package, monkeypatch):
    first = commit(package)
    monkeypatch.setattr(provenance.subprocess, "run", None)
    assert commit(package) == first


def test_a_repository_in_the_environment_does_not_matter(package, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path_factory.mktemp("elsewhere")))
    assert commit(package) is not None


def test_versions_have_the_commit_where_there_is_one(monkeypatch):
    monkeypatch.setattr(provenance, "commit", lambda _: "1234567")
    assert versions()["commit"] == "1234567"
    monkeypatch.setattr(provenance, "commit", lambda _: None)
    assert versions().keys() == {"fewshift", "torch", "python"}


def test_a_result_says_what_its_network_is():
    steps = Preprocess(resize=256, crop=224, mean=(0.5,) * 3, std=(0.5,) * 3)
    card = Card(arch="timm:resnet18", algorithm={"name": "mixstyle", "p": 0.5}, preprocess=steps)
    assert network_facts(with_card(make_tiny(), card)) == {
        "arch": "timm:resnet18",
        "algorithm": "mixstyle",
        "pixels": 224,
    }
    assert network_facts(make_tiny()) == {}
    assert run(CELL, tiny_materials())["network"] == {}
