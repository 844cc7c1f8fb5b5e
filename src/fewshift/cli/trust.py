"""Commands that tell whether to trust a network: is it used on what it was trained on?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewshift.cli.app import Crop, Json, Mean, Model, Resize, Std, Weights, app
from fewshift.cli.console import print_json, print_table, progress_bar
from fewshift.cli.loading import load_network, steps_of

TOP = 10  # layers that the table has


@app.command()
def shift(
    images: Annotated[Path, typer.Argument(help="A folder of images (or one image) from the new place, no labels.")],
    model: Model = None,
    weights: Weights = None,
    source: Annotated[
        Path | None, typer.Option(help="Images known to be like those of training, to compare with; not needed.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every layer, not only the strongest.")] = False,
    head: Annotated[str | None, typer.Option(help="The name of the last linear layer, if it is not found.")] = None,
    resize: Resize = None,
    crop: Crop = None,
    mean: Mean = None,
    std: Std = None,
    as_json: Json = False,
) -> None:
    """Whether images differ from what a network was trained on, layer by layer, without labels."""
    import fewshift

    loaded = load_network(model, weights, None, resize, crop, mean, std)
    with progress_bar() as tell:
        found = fewshift.shift(
            loaded.model, images, source=source, preprocess=steps_of(loaded), head=head, progress=tell
        )
    if as_json:
        print_json(found.to_json())
        return
    typer.echo(found.words)
    shown = found.ranked if everything else found.ranked[:TOP]
    print_table(
        "layers, the strongest shift first" if everything else f"the {len(shown)} layers with the strongest shift",
        ["layer", "score", "means off by", "deviations times"],
        [[it.name, f"{it.score:.2f}", f"{it.mean_shift:.3f}", f"{it.std_ratio:.3f}"] for it in shown],
    )
