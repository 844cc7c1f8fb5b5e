"""`fewshift adapt`: fit a network to a new place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fewshift.cli._sites import adapt_to_sites
from fewshift.cli.console import (
    MisuseError,
    check_outputs,
    number,
    print_json,
    print_left_out,
    print_written,
    reading_words,
    say,
)
from fewshift.cli.options import (
    LABELLED,
    Head,
    Json,
    MethodName,
    NetworkOptions,
    Report,
    Seed,
    Setting,
    Shots,
    Unlabelled,
    command,
)

if TYPE_CHECKING:
    from fewshift import Adaptation

CONDITIONS = ("not-worse", "better", "always")


@command(
    examples="""
    fewshift adapt -m timm:resnet18 -w w.pt -s photos/ -o site.safetensors
    fewshift adapt -m timm:resnet18 -w w.pt -s photos/ --report site.html
    fewshift adapt -m timm:resnet18 -w w.pt -s photos/ --unlabelled stream/
    fewshift adapt -m timm:resnet18 -w w.pt -s photos/ --size small
    fewshift adapt -m timm:resnet18 -w w.pt --sites places/ -o sites/ -j 2
    """
)
def adapt(
    network: NetworkOptions,
    support: Annotated[Path | None, typer.Option(help=LABELLED)] = None,
    sites: Annotated[
        Path | None,
        typer.Option(
            help="A folder with one folder of labelled images per place: adapt to each, and write their deltas into "
            "the folder --out. Run it again to continue."
        ),
    ] = None,
    unlabelled: Unlabelled = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the delta here: only the tensors that changed. With --sites, the folder of deltas."),
    ] = None,
    report: Report = None,
    method: MethodName = "auto",
    setting: Setting = None,
    shots: Shots = None,
    validate: Annotated[
        str,
        typer.Option(
            metavar="WAY",
            help="Where the evidence comes from: cv, loo, none, or other labelled images, a folder or a file.",
        ),
    ] = "cv",
    accept: Annotated[
        str,
        typer.Option(
            metavar="RULE", help="not-worse, better, always, or a number of points that the interval has to exceed."
        ),
    ] = "not-worse",
    write_rejected: Annotated[
        bool, typer.Option("--write-rejected", help="Write the delta of a rejected adaptation too.")
    ] = False,
    size: Annotated[
        Literal["any", "small"] | None,
        typer.Option(help="small changes BatchNorm and the head alone: kilobytes. For the method auto."),
    ] = None,
    drop_suspects: Annotated[
        bool, typer.Option("--drop-suspects", help="Adapt once more without the images whose label looks wrong.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also say what engineers ask: likelihoods, candidates, layers.")
    ] = False,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Adapt even if the labels look permuted: that becomes a warning.")
    ] = False,
    head: Head = None,
    seed: Seed = 0,
    workers: Annotated[int, typer.Option(min=1, help="With --sites: processes, one thread each.")] = 1,
    engine: Annotated[str, typer.Option(help="With --sites: local, or ray for a Ray cluster.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster, or auto; a local one is started by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit a network to the place of the support images, or with --sites to many places.

    Exit code 3: the adaptation was rejected, and the source network is kept.

    With --sites: 0 if every place was accepted, 3 if some were rejected, 1 if some failed.
    """
    import fewshift
    from fewshift.api import method_from_words

    with reading_words():
        chosen = method_from_words(method, setting or [])
    condition = _condition(accept)
    if sites is not None:
        one_place = {"--support": support is not None, "--unlabelled": unlabelled is not None}
        one_place |= {"--write-rejected": write_rejected, "--verbose": verbose}
        if out is None or any(one_place.values()):
            words = ", ".join(word for word, value in one_place.items() if value)
            raise MisuseError(
                "--sites adapts to many places: " + ("give --out FOLDER" if out is None else f"leave out {words}")
            )
        adapt_to_sites(
            network, sites, out, report, as_json=as_json, workers=workers, engine=engine, address=address,
            method=chosen, shots=shots, validate=None if validate == "none" else validate, accept=condition, size=size,
            drop_suspects=drop_suspects, check=not no_check, head=head, seed=seed,
        )  # fmt: skip
        return
    if workers > 1 or engine != "local" or address is not None:
        raise MisuseError("--workers, --engine and --address share out places: give --sites, or leave them out")
    if support is None and unlabelled is None:
        raise MisuseError("there are no images to adapt to: give --support, --unlabelled or both")
    if size is not None and method != "auto":
        raise MisuseError(f"--size is a choice of the method auto, not of {method}: leave it out")
    check_outputs([out, report], network.files)
    if (out or report) and not chosen.plain:
        raise MisuseError(
            f"{method} returns a {chosen.returns}, which has no delta and no report: "
            "leave out --out and --report, or for late-fusion --set scores=logits"
        )
    with network.opened() as (model, arguments):
        result = fewshift.adapt(
            model, support, method=chosen, unlabelled=unlabelled, shots=shots, **arguments,
            validate=None if validate == "none" else validate, accept=condition, size=size,
            drop_suspects=drop_suspects, check=not no_check, head=head, seed=seed,
        )  # fmt: skip
    print_left_out(support, unlabelled, warned=True)
    print_left_out(validate)
    keep = out is not None and (result.accepted or write_rejected)
    written = {
        "delta": result.candidate_delta.save(out) if out is not None and keep else None,
        "report": None if report is None else result.report(report, out if keep else None, origin=network.origin()),
    }
    if as_json:
        print_json(result.to_json() | {name: path and str(path) for name, path in written.items()})
    else:
        _print(result, written)
        _print_suspects(result, drop=drop_suspects)
        if verbose:
            _print_details(result)
    if not result.accepted:
        raise typer.Exit(3)


def _print(result: Adaptation, written: Mapping[str, Path | None]) -> None:
    from fewshift.report import cautions, prose
    from fewshift.report.recommendation import Advice

    for caution in result.warnings:
        say(f"{'warning' if caution.serious else 'note'}: {cautions.sentence(caution)}", err=True)
    said = result.recommendation
    colour = {Advice.RECOMMENDED: "green", Advice.CAUTION: "yellow", Advice.AGAINST: "red"}[said.advice]
    say(f"{result.method.name}: {prose.looked_at(result)}, {result.seconds:.1f} s")
    typer.secho(said.advice.value, fg=colour, bold=True)
    for line in said.lines:
        say(f"  {line}")
    print_written(written)
    if not result.accepted and written["delta"] is None:
        say("no delta was written; --write-rejected --out FILE writes it all the same")


def _print_details(result: Adaptation) -> None:
    """For engineers."""
    from fewshift.report import choosing, prose

    say(result.reason)
    if result.notes.get("classifier"):
        say(f"blend v = {number(result.notes['v'])}, classifier: {result.notes['classifier']}")
    for sentence in filter(None, (choosing.chosen(result), choosing.unlabelled(result))):
        say(sentence)
    if result.calibration is not None and result.calibration.applied:
        say(prose.calibration(result.calibration))
    say(f"{sum(layer.skipped is None for layer in result.layers)} BatchNorm layers")
    for layer in (layer for layer in result.layers if layer.skipped):
        say(f"left alone: {layer.name} ({layer.kind}): {layer.skipped}")


def _print_suspects(result: Adaptation, *, drop: bool) -> None:
    from fewshift.report import suspects

    if result.dropped:
        say(suspects.dropped(result.dropped))
    elif drop:
        say("no label looks wrong: nothing was dropped")
    for phrase in filter(None, (suspects.looks_wrong(result.suspects), suspects.gain_without(result.suspects))):
        say(phrase)
    if result.suspects and not drop:
        say("--drop-suspects adapts again without " + ("it" if len(result.suspects) == 1 else "them"))


def _condition(text: str) -> str | float:
    """A word, or a number."""
    try:
        return float(text)
    except ValueError:
        if text in CONDITIONS:
            return text
    raise MisuseError(f"--accept {text} is no condition: choose {', '.join(CONDITIONS)} or a number of points")
