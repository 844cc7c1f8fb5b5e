"""Commands about many experiments: the benchmark, its report, and what there is to choose from."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fewshift.cli.app import Json, app
from fewshift.cli.console import Lines, one_thread, print_json, print_table, progress_bar
from fewshift.errors import FewshiftError

if TYPE_CHECKING:
    from fewshift.lab.bench.features import FeatureGrid
    from fewshift.lab.bench.grid import Grid
    from fewshift.lab.bench.record import Records
    from fewshift.lab.bench.trust import Trial
    from fewshift.report.tables import Table


@app.command()
def bench(
    names: Annotated[
        list[str], typer.Argument(metavar="GRIDS...", help="Names (see `fewshift list grids`), or files.")
    ],
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/NAME of the first grid by default.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where data sets lie; FEWSHIFT_DATA otherwise.")] = None,
    weights: Annotated[Path | None, typer.Option(help="A folder of source networks, SOURCE.safetensors each.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 1,
    engine: Annotated[str, typer.Option(help="local, or ray: on a Ray cluster.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="Of the Ray cluster, or auto; without it a local one is started.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the cells of grids that have no result yet; call it again to go on where it stopped."""
    one_thread()
    from fewshift.lab.bench.features import grid_file, load_grid
    from fewshift.lab.bench.record import Records
    from fewshift.lab.bench.sweep import missing, sweep
    from fewshift.lab.bench.workshop import open_workshop

    grids = [grid_file(name) for name in names]
    plans = [load_grid(grid) for grid in grids]
    _check_plans(grids, plans)
    cells = list({cell.key: cell for plan in plans for cell in plan.cells()}.values())
    folder = out or Path("runs") / grids[0].stem
    records = Records(folder)
    for grid in grids:
        records.keep_grid(grid)
    left = len(missing(cells, records))
    errors: list[str] = []
    done = 0
    with progress_bar() as bar:
        tell = bar if sys.stderr.isatty() else Lines()

        def hear(record: dict[str, Any]) -> None:
            nonlocal done
            done += 1
            if "error" in record:
                errors.append(record["error"])
            tell("cells", done, left, f"{len(errors)} failed")

        arguments = (_absolute(data_root), _absolute(weights))
        bar("cells", 0, left, "0 failed")
        try:
            sweep(cells, folder, open_workshop, arguments, workers=workers, tell=hear, engine=engine, address=address)
        except KeyboardInterrupt:
            typer.echo(f"stopped after {done} of {left} cells: call it again to go on", err=True)
            raise
    still = len(missing(cells, records))
    if as_json:
        print_json({"folder": str(folder), "cells": len(cells), "run": done, "failed": len(errors), "missing": still})
    else:
        typer.echo(f"{len(cells) - still} of {len(cells)} cells have a result, {done} were run now: {folder}")
        if not still:
            typer.echo(f"see it: fewshift report {folder}")
    for sentence in sorted(set(errors)):
        times = errors.count(sentence)
        typer.echo(f"failed: {sentence}" + (f" ({times} cells)" if times > 1 else ""), err=True)
    if still > len(errors):
        typer.echo(f"{still - len(errors)} cells have no result: another process has them, or had them", err=True)
    _tell_damage(records)
    if still:
        raise typer.Exit(1)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/smoke.")],
    as_json: Json = False,
) -> None:
    """Print the tables of a run; write them as Markdown, CSV and LaTeX, and a page with figures, into its folder."""
    from fewshift.lab.bench import trust
    from fewshift.lab.bench.features import load_grid
    from fewshift.lab.bench.grid import Grid
    from fewshift.lab.bench.page import judged_of, run_page
    from fewshift.lab.bench.record import Records
    from fewshift.lab.bench.results import table_of
    from fewshift.report import tables

    if not (run / "records.jsonl").is_file():
        raise FewshiftError(f"there are no records in {run}: give the folder that `fewshift bench` named")
    records = Records(run)
    found = records.read()
    plans = {path.stem: load_grid(path) for path in records.grids()}
    finished = {
        name: tables.with_average(table_of(plan, found)) for name, plan in plans.items() if isinstance(plan, Grid)
    }
    judged, together = judged_of(plans, found)
    page = run_page(run)
    texts = {f"tables/{name}": _table_texts(table) for name, table in finished.items()}
    texts |= {f"tables/{name}-judged": _trial_texts(plans[name].title, them) for name, them in judged.items()}
    texts |= {"judged": _trial_texts("All grids", together)} if together else {}
    _write(run, texts)
    counts = {name: _counts(plan.cells(), found) for name, plan in plans.items()}
    _tell_damage(records)
    if as_json:
        written = {name: tables.plain(table) for name, table in finished.items()}
        told = {"judged": {name: trust.plain(them) for name, them in judged.items()}} if judged else {}
        told |= {"judged_together": trust.plain(together)} if together else {}
        print_json({"page": str(page), "cells": counts, "tables": written, **told})
        return
    for name, plan in plans.items():
        if not isinstance(plan, Grid):
            _print_gaps(plan, found)
        for part in (f"tables/{name}", f"tables/{name}-judged"):
            if part in texts:
                typer.echo(texts[part]["md"])
        if counts[name]["failed"] or counts[name]["missing"]:
            gaps = ", ".join(f"{count} {what}" for what, count in counts[name].items())
            typer.echo(f"{name}: {gaps}", err=True)
    if together:
        typer.echo(texts["judged"]["md"])
    typer.echo(f"tables: {run / 'tables'}, page: {page}")


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="methods, algorithms, recipes, models, datasets or grids.")],
    contains: Annotated[str, typer.Option("--filter", help="Only names that contain this.")] = "",
    folder: Annotated[Path | None, typer.Option(help="Where grid files lie; those of the package otherwise.")] = None,
    as_json: Json = False,
) -> None:
    """What there is to choose from."""
    if what == "models":
        from fewshift.models import libraries as models

        names = [name for name in models.names() if contains in name]
        typer.echo(json.dumps(names) if as_json else "\n".join(names))
    elif what == "grids":
        _print_grids(folder, contains, as_json)
    elif what in KINDS:
        note, rows, brief = KINDS[what]
        found = [it for it in rows() if contains in it["name"] or contains in it.get("dataset", "")]
        _print_found(f"{what}{note}", found if as_json else [brief(it) for it in found], as_json)
    else:
        *most, last = [*KINDS, "models", "grids"]
        raise typer.BadParameter(f"'{what}' is unknown: choose {', '.join(most)} or {last}")


def _methods() -> list[dict[str, Any]]:
    from fewshift.methods import catalog as catalogue

    return catalogue.rows()


def _algorithms() -> list[dict[str, Any]]:
    from fewshift.lab.training import ALGORITHMS

    return [
        {
            "name": name,
            "what it does": (inspect.getdoc(kind) or "").partition("\n")[0],
            "paper": kind.paper,
            "settings": {it.name: it.default for it in fields(kind)},
        }
        for name, kind in ALGORITHMS.items()
    ]


def _recipes() -> list[dict[str, Any]]:
    from fewshift.core.labels import IMAGES, PIXELS
    from fewshift.lab.training.recipes import OTHERS, RECIPES

    return [
        {"name": name, "dataset": dataset, "settings": recipe.settings()}
        for name, own in RECIPES.items()
        for dataset, recipe in {
            **own,
            "other images": OTHERS[name][IMAGES],
            "other scenes": OTHERS[name][PIXELS],
        }.items()
    ]


def _datasets() -> list[dict[str, Any]]:
    from fewshift.lab.datasets.catalog import describe

    return describe()


def _brief_settings(row: dict[str, Any], *columns: str) -> dict[str, Any]:
    from fewshift.methods.catalog import settings_line

    return {**{column: row[column] for column in columns}, "settings": settings_line(row)}


def _brief_recipe(row: dict[str, Any]) -> dict[str, Any]:
    """A recipe by what is not usual in it."""
    from fewshift.lab.training.recipes import Recipe

    usual = {it.name: it.default for it in fields(Recipe)}
    unusual = {key: value for key, value in row["settings"].items() if value != usual[key]}
    return _brief_settings({**row, "settings": unusual}, "name", "dataset")


def _brief_dataset(row: dict[str, Any]) -> dict[str, Any]:
    short = ("name", "title", "domains", "classes", "images", "metric", "where")
    return {**{key: row[key] for key in short}, "domains": ", ".join(row["domains"])}


# of each kind: a word to the reader, its rows, and a row as the table has it
KINDS: dict[str, tuple[str, Callable[[], list[dict[str, Any]]], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "methods": ("", _methods, lambda row: _brief_settings(row, "name", "looks at", "returns", "paper")),
    "algorithms": ("", _algorithms, lambda row: _brief_settings(row, "name", "what it does", "paper")),
    "recipes": (" (--json tells all settings, not only the unusual)", _recipes, _brief_recipe),
    "datasets": (" (--json tells splits, recipes and licences too)", _datasets, _brief_dataset),
}


def _print_grids(folder: Path | None, contains: str, as_json: bool) -> None:
    from fewshift.lab.bench.features import GRIDS, load_grid

    files = sorted(path for path in (folder or GRIDS).glob("*.toml") if contains in path.stem)
    if not files:
        where = f"in {folder}: pass a --folder with grids" if folder else "of that name: leave out --filter"
        raise FewshiftError(f"there are no grids {where}")
    plans = {path: load_grid(path) for path in files}
    found = [
        {
            "name": path.stem if folder is None else str(path),
            "title": plan.title,
            "cells": len({cell.key for cell in plan.cells()}),
        }
        for path, plan in plans.items()
    ]
    _print_found("grids", found, as_json)


def _check_plans(files: Sequence[Path], plans: Sequence[Grid | FeatureGrid]) -> None:
    """What can be told before any cell is run."""
    from fewshift.lab.bench.grid import Grid
    from fewshift.lab.datasets.catalog import find_collection

    names = [file.stem for file in files]
    for name in names:
        if names.count(name) > 1:
            raise FewshiftError(f"two grids are called {name}, and a run keeps one of a name: rename one")
    for file, plan in zip(files, plans, strict=True):
        places = plan.places if isinstance(plan, Grid) else ()
        for place in places:
            known = find_collection(place.dataset)
            for part in place.target.split("+"):
                if part not in known.domains:
                    raise FewshiftError(
                        f"{file} has the target '{part}', which {known.name} lacks: use {', '.join(known.domains)}"
                    )


def _table_texts(table: Table) -> dict[str, str]:
    """The table of a grid by the ending of the file that it goes into."""
    from fewshift.report import tables

    return {"md": tables.markdown(table), "csv": tables.comma_separated(table), "tex": tables.latex(table)}


def _trial_texts(title: str, them: Sequence[Trial]) -> dict[str, str]:
    """The same for what became of judged adaptations; the numbers of each are in the CSV."""
    from fewshift.lab.bench import trust
    from fewshift.report import tables

    listing = trust.listing(f"{title}: adaptations judged", them)
    return {
        "md": tables.listing_markdown(listing),
        "csv": trust.comma_separated(them),
        "tex": tables.listing_latex(listing),
    }


def _write(run: Path, texts: Mapping[str, Mapping[str, str]]) -> None:
    from fewshift.core._files import whole

    (run / "tables").mkdir(exist_ok=True)
    for name, endings in texts.items():
        for ending, text in endings.items():
            with whole(run / f"{name}.{ending}") as draft:
                draft.write_text(text, encoding="utf-8")


def _counts(cells: Sequence[Any], records: Mapping[str, Any]) -> dict[str, int]:
    found = [records.get(key, {}) for key in {cell.key for cell in cells}]
    done, failed = (sum(what in it for it in found) for what in ("result", "error"))
    return {"done": done, "failed": failed, "missing": len(found) - done - failed}


def _print_gaps(plan: FeatureGrid, records: Mapping[str, Any]) -> None:
    """How far two samples lie apart within a class, before and after the layer."""
    results = [(cell.label, records.get(cell.key, {}).get("result")) for cell in plan.cells()]
    rows = [[label, f"{it['gap_before']:.2f}", f"{it['gap_after']:.2f}"] for label, it in results if it]
    print_table(f"{plan.title}: distance within a class, in spreads", ["comparison", "before", "after"], rows)


def _tell_damage(records: Records) -> None:
    if records.damaged:
        typer.echo(f"{records.file} has {records.damaged} lines that are no records: they are passed over", err=True)


def _print_found(title: str, found: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    columns = list(found[0]) if found else []
    print_table(title, columns, [[str(it[column]) for column in columns] for it in found])


def _absolute(path: Path | None) -> str | None:
    """As text that means the same in a worker's folder."""
    return None if path is None else str(path.absolute())
