"""`fewshift report --docs`: a page for each grid of some runs, and the figures that join them, in one folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fewshift.core._files import whole
from fewshift.errors import FewshiftError
from fewshift.lab.bench.compared import AveragedGrid, averaged_grids, over_batch_sizes, over_imbalance, over_k
from fewshift.lab.bench.folder import RunFolder, open_run
from fewshift.lab.bench.result_pages import has_results, page_name, page_text
from fewshift.report.compared_figures import ComparedFigure, draw_compared

KEPT = "<!-- From here on written by hand: `fewshift report` keeps it. -->"
FIGURES: dict[str, Callable[[Sequence[AveragedGrid]], ComparedFigure | None]] = {
    "accuracy-over-k.png": over_k,
    "accuracy-over-batch-size.png": over_batch_sizes,
    "accuracy-over-imbalance.png": over_imbalance,
}


@dataclass(frozen=True)
class ResultDocs:
    """The files that were written."""

    pages: tuple[Path, ...]
    figures: tuple[Path, ...]


def write_docs(runs: Sequence[str | Path], folder: str | Path) -> ResultDocs:
    """Write a page for every grid with results, and the figures that there are data for.

    Text below the line `KEPT` of a page that exists is kept. Networks of one name are taken to be the same in all runs,
    unless records say that they are not.
    """
    folder = Path(folder)
    opened = [open_run(run) for run in runs]
    _refuse_repeated(opened)
    texts = {
        folder / page_name(name): page_text(run, name, folder)
        for run in opened
        for name in run.grids
        if has_results(run, name)
    }
    pages = {
        path: f"{text}\n{KEPT}\n{_kept(path)}" for path, text in texts.items()
    }  # all are read before one is written
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FewshiftError(f"cannot write into {folder} ({error.strerror}): choose another folder") from error
    for path, text in pages.items():
        with whole(path) as draft:
            draft.write_text(text, encoding="utf-8")
    grids = averaged_grids(opened)
    gathered = {file: gather(grids) for file, gather in FIGURES.items()}
    figures = [draw_compared(figure, folder / file) for file, figure in gathered.items() if figure is not None]
    return ResultDocs(tuple(pages), tuple(figures))


def _kept(path: Path) -> str:
    """What a person wrote into a page; a page that is all by hand is nobody's to overwrite."""
    if not path.exists():
        return ""
    text = path.read_text(encoding="utf-8")
    _, line, kept = text.partition(KEPT)
    if not line:
        raise FewshiftError(
            f"{path} was not written by `fewshift report`: move it, or put the line {KEPT} above what shall be kept"
        )
    return kept.removeprefix("\n")


def _refuse_repeated(runs: Sequence[RunFolder]) -> None:
    """A grid has one page, so it may be in one run."""
    owners: dict[str, str] = {}
    for run in runs:
        for name in run.grids:
            if name in owners:
                raise FewshiftError(
                    f"the grid {name} is in two runs, {owners[name]} and {run.name}, but has one page: "
                    "report one of them into another folder"
                )
            owners[name] = run.name
