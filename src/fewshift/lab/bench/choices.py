"""Choices: what `fewshift list` shows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from fewshift.core import labels
from fewshift.errors import FewshiftError
from fewshift.lab.bench.features import GRIDS, load_grid
from fewshift.lab.datasets.catalog import describe
from fewshift.lab.training import ALGORITHMS
from fewshift.lab.training.recipes import OTHERS, RECIPES, Recipe
from fewshift.methods import catalog
from fewshift.models import libraries

Choice = dict[str, Any]


def choices(kind: str, contains: str = "", folder: Path | None = None) -> list[Choice]:
    """Everything of a kind whose name, or data set, contains some text; `folder` has grids beside the package's."""
    if kind == "grids":
        return grids(contains, folder)
    if kind not in KINDS:
        raise FewshiftError(f"'{kind}' is unknown: choose one of {', '.join((*KINDS, 'grids'))}")
    return [choice for choice in KINDS[kind]() if contains in choice["name"] or contains in choice.get("dataset", "")]


def algorithms() -> list[Choice]:
    """Training algorithms with their papers and settings."""
    return [
        {
            "name": name,
            "what it does": (inspect.getdoc(algorithm) or "").partition("\n")[0],
            "paper": algorithm.paper,
            "settings": {each.name: each.default for each in fields(algorithm)},
        }
        for name, algorithm in ALGORITHMS.items()
    ]


def recipes() -> list[Choice]:
    """Training recipes by data set, with all their settings."""
    return [
        {"name": name, "dataset": dataset, "settings": recipe.settings()}
        for name, own in RECIPES.items()
        for dataset, recipe in {
            **own,
            "other images": OTHERS[name][labels.IMAGES],
            "other scenes": OTHERS[name][labels.PIXELS],
        }.items()
    ]


def unusual(recipe: Choice) -> Choice:
    """A recipe with only the settings that differ from the defaults."""
    usual = {each.name: each.default for each in fields(Recipe)}
    return recipe | {"settings": {name: value for name, value in recipe["settings"].items() if value != usual[name]}}


def grids(contains: str = "", folder: Path | None = None) -> list[Choice]:
    """The grids of the package, or of a folder, with the number of their cells."""
    files = sorted(path for path in (folder or GRIDS).glob("*.toml") if contains in path.stem)
    if not files:
        where = (
            f"in {folder}: pass a --folder with grids" if folder else f"with '{contains}' in its name: drop --filter"
        )
        raise FewshiftError(f"there is no grid {where}")
    plans = {path.stem if folder is None else str(path): load_grid(path) for path in files}
    return [
        {"name": name, "title": plan.title, "cells": len({cell.key for cell in plan.cells()})}
        for name, plan in plans.items()
    ]


KINDS: dict[str, Callable[[], list[Choice]]] = {
    "methods": catalog.rows,
    "algorithms": algorithms,
    "recipes": recipes,
    "models": lambda: [{"name": name} for name in libraries.names()],
    "datasets": describe,
}
