"""`fewshift shift`: do images differ from what a network was trained on?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fewshift.cli.console import print_json, print_left_out, print_table, progress_bar, say
from fewshift.cli.options import Head, Json, NetworkOptions, command

if TYPE_CHECKING:
    from fewshift import Shift

TOP = 10  # layers that the table has
ALARM = 4  # the exit code of --fail-on-alarm


@command(
    examples="""
    fewshift shift -m timm:resnet18 -w w.pt images/
    fewshift shift -m timm:resnet18 -w w.pt images/ --source training/ --all
    """
)
def shift(
    images: Annotated[Path, typer.Argument(help="A folder of images (or one image) from the new place, no labels.")],
    network: NetworkOptions,
    source: Annotated[
        Path | None, typer.Option(help="Images known to be like those of training, to compare with; not needed.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every layer, not only the strongest.")] = False,
    fail_on_alarm: Annotated[
        bool, typer.Option("--fail-on-alarm", help=f"End with exit code {ALARM} if the images differ: for cron.")
    ] = False,
    head: Head = None,
    as_json: Json = False,
) -> None:
    """Whether images differ from what a network was trained on, layer by layer, without labels.

    An alarm says that the images as a whole look unlike those of training. It does not say that predictions are wrong.
    """
    import fewshift
    from fewshift.report import prose

    model = network.load()
    with progress_bar() as tell:
        steps = network.steps_of(model)
        shift = fewshift.shift(model, images, source=source, preprocess=steps, head=head, progress=tell)
    print_left_out(images, source)
    if as_json:
        print_json(shift.to_json() | {"words": prose.shift(shift), "meaning": prose.shift_meaning(shift)})
    else:
        _print(shift, everything)
    if fail_on_alarm and shift.shifted:
        raise typer.Exit(ALARM)


def _print(shift: Shift, everything: bool) -> None:
    from fewshift.report import prose

    say(prose.shift(shift))
    say(prose.shift_meaning(shift))
    shown = shift.ranked if everything else shift.ranked[:TOP]
    print_table(
        "layers, the strongest shift first" if everything else f"the {len(shown)} layers with the strongest shift",
        ["layer", "score", "means off by", "deviations times"],
        [[layer.name, f"{layer.score:.2f}", f"{layer.mean_shift:.3f}", f"{layer.std_ratio:.3f}"] for layer in shown],
    )
