"""`fewshift export`: the network as a file that runs elsewhere, compared with PyTorch before it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewshift.cli.console import check_outputs, print_facts, print_json
from fewshift.cli.options import DeltaFile, Json, NetworkOptions, command


@command(
    examples="""
    fewshift export -m timm:resnet18 -w w.pt -d site.safetensors -o site.onnx
    fewshift export -m timm:resnet18 -w w.pt --with-preprocessing -o base.onnx
    fewshift export -m timm:resnet18 -w w.pt -d site.safetensors \\
        --base base.onnx -o camera-7.site
    """
)
def export(
    out: Annotated[
        Path, typer.Option(help="Write here: .onnx, .pt2 (torch.export), .xml (OpenVINO) or .site; the suffix decides.")
    ],
    network: NetworkOptions,
    delta: DeltaFile = None,
    images: Annotated[
        Path | None, typer.Option(help="Images to compare PyTorch and the runtime on; made ones by default.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="For .site: the source network as ONNX; only what is different from it is written."),
    ] = None,
    format: Annotated[
        str | None, typer.Option(metavar="NAME", help="onnx, torch, openvino or site, if the suffix shall not decide.")
    ] = None,
    with_preprocessing: Annotated[
        bool, typer.Option("--with-preprocessing", help="Take uint8 images, and scale and normalise them in the graph.")
    ] = False,
    opset: Annotated[int | None, typer.Option(help="The opset of ONNX; 20 by default.")] = None,
    as_json: Json = False,
) -> None:
    """Write the network, or what a delta makes of it, to a file that runs without its code.

    The same images go through PyTorch and through the runtime first. If they differ, nothing is written.
    """
    import fewshift

    check_outputs([out], [*network.files, delta, base])
    with network.opened(delta) as (model, arguments):
        result = fewshift.export(
            model, out, delta=delta, base=base, format=format, with_preprocessing=with_preprocessing, images=images,
            opset=opset, **arguments,
        )  # fmt: skip
    if as_json:
        print_json(result.to_json())
        return
    print_facts(", ".join(str(file) for file in result.files), result.facts)
