"""Only picture formats are decoded, whatever a file is called: other decoders of Pillow start programs."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

import fewshift
from fewshift.errors import FewshiftError
from fewshift.images.folders import open_image
from fewshift.images.formats import opened, picture

POSTSCRIPT = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 16 16
%%EndComments
showpage
%%EOF
"""
PACKAGE = Path(fewshift.__file__).parent


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Pillow gave to Ghostscript."""
    calls: list[str] = []

    def ghostscript(*_: object, **__: object) -> Image.Image:
        calls.append("gs")
        return Image.new("RGB", (16, 16)).im

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", ghostscript)
    return calls


def test_pillow_alone_would_give_postscript_to_ghostscript(tmp_path: Path, started: list[str]) -> None:
    (tmp_path / "a.png").write_bytes(POSTSCRIPT)
    with Image.open(tmp_path / "a.png") as image:
        image.load()
    assert started == ["gs"]


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.tif"])
def test_postscript_that_is_called_an_image_reaches_no_ghostscript(
    tmp_path: Path, started: list[str], name: str
) -> None:
    (tmp_path / name).write_bytes(POSTSCRIPT)
    with pytest.raises(FewshiftError, match=f"{name} is not an image"):
        open_image(tmp_path / name, "RGB")
    with pytest.raises(FewshiftError, match=f"{name} is not an image"), opened(tmp_path / name) as image:
        image.load()
    with pytest.raises(OSError, match="cannot identify"):
        picture(io.BytesIO(POSTSCRIPT)).load()
    assert started == []


@pytest.mark.parametrize("kind", ["bmp", "gif", "jpeg", "png", "ppm", "tiff", "webp"])
def test_a_picture_is_read_whatever_its_suffix_says(tmp_path: Path, kind: str) -> None:
    Image.new("RGB", (16, 16), (200, 200, 200)).save(tmp_path / "other.png", kind)
    assert abs(np.asarray(open_image(tmp_path / "other.png", "RGB")).astype(int) - 200).max() <= 4


def test_a_photograph_of_several_pictures_is_read_by_its_first(tmp_path: Path) -> None:
    first, second = Image.new("RGB", (16, 16), (200, 200, 200)), Image.new("RGB", (16, 16))
    first.save(tmp_path / "phone.jpg", "MPO", save_all=True, append_images=[second])
    assert abs(np.asarray(open_image(tmp_path / "phone.jpg", "RGB")).astype(int) - 200).max() <= 4


def test_one_function_opens_every_image() -> None:
    calls = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Image.open", "PIL.Image.open")
    ]
    assert [call.partition(":")[0] for call in calls] == ["images/formats.py"]
