"""The studio: a local page on which a person labels, adapts and decides.

    from fewshift.studio import serve
    serve(net, "photos/")                      # opens a page of this machine; Ctrl-C ends it

Nothing leaves the machine. Labels and adaptations are in `photos-studio/`, or in `out=`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewshift.errors import FewshiftError

if TYPE_CHECKING:
    from torch import nn

    from fewshift.images.inputs import Steps
    from fewshift.studio.serving import Studio

__all__ = ["open_studio", "serve"]

MISSING = 'the studio needs starlette and uvicorn: pip install "fewshift[studio]"'


def open_studio(
    model: nn.Module,
    images: str | Path,
    *,
    labels: str | Path | None = None,
    out: str | Path | None = None,
    classes: Sequence[str] | None = None,
    preprocess: Steps = None,
    port: int = 0,
    size: str | None = None,
    seed: int = 0,
    origin: Mapping[str, str] | None = None,
) -> Studio:
    """A studio that does not serve yet: `with open_studio(...) as studio:` does, in a thread of its own.

    `images` is a folder, with images/ and labels/ where pixels have labels. `labels` are existing ones: class folders,
    a CSV, an export of Label Studio, COCO-style JSON. `out` is where labels and adaptations go, `photos-studio/` beside
    `photos/` by default. `size` and `seed` are those of `adapt`, `origin` is what reports shall say about where they
    come from. `bench.write_labels("csv")` of the studio writes the labels without the page.
    """
    try:
        from fewshift.studio.serving import Studio
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise FewshiftError(MISSING) from error
    options = {"seed": seed} | ({} if size is None else {"size": size})
    return Studio(
        model, images, labels=labels, out=out, classes=classes, preprocess=preprocess, port=port, options=options,
        origin=origin,
    )  # fmt: skip


def serve(
    model: nn.Module,
    images: str | Path,
    *,
    browser: bool = True,
    tell: Callable[[str], None] | None = None,
    **options: Any,
) -> None:
    """Open the page and serve it until Ctrl-C; `options` are those of `open_studio`, `tell` hears the address."""
    studio = open_studio(model, images, **options)
    from fewshift.studio.serving import open_page

    open_page(studio, browser=browser, tell=tell)
    studio.run()
