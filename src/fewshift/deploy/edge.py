"""A network on a device: numpy and onnxruntime alone, PyTorch is not imported.

    session = Session("base.onnx", site="camera-7.site")
    logits = session.run(images)
    session.switch("camera-8.site")

A site's tensors are written over those of the base network in memory, at the places where its file has them. The
runtime then opens an ordinary network, and folds BatchNorm into convolutions as it does for any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshift.deploy.site_format import AGAIN, BaseFile, SiteFile
from fewshift.errors import FewshiftError

CPU = ("CPUExecutionProvider",)
FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}  # types of which a value may be no number


class _Opened(NamedTuple):
    """A network that can run: replaced as one, so that a thread never sees half a switch."""

    session: Any
    site: SiteFile | None


class Session:
    """The network in `base`, an ONNX file that `fewshift export` wrote, as it is at `site`.

    `threads` is how many compute; `providers` are those of onnxruntime.
    """

    def __init__(
        self,
        base: str | Path,
        site: str | Path | None = None,
        *,
        threads: int | None = None,
        providers: Sequence[str] = CPU,
    ) -> None:
        self._base = BaseFile(base)
        self._threads, self._providers = threads, list(providers)
        self._opened = self._open(site)

    def run(self, images: NDArray[Any]) -> NDArray[np.float32]:
        """The logits of a batch: (N, classes), or (N, classes, height, width).

        Images are (N, channels, height, width) in float32, preprocessed; or (N, height, width, channels) in uint8,
        RGB, of the size that `preprocess` says: then values are scaled and normalised here, or by the network itself.
        """
        opened = self._opened
        logits = opened.session.run(None, {"images": self._prepared(images, opened.site)})[0]
        return np.asarray(logits, np.float32)

    def predict(self, images: NDArray[Any]) -> NDArray[np.int64]:
        """The number of the class of each image, (N,), or of each pixel, (N, height, width)."""
        logits = self.run(images)
        if logits.ndim == 2 and logits.shape[1] == 1:  # one logit for two classes
            return (logits[:, 0] > 0).astype(np.int64)
        return np.asarray(logits.argmax(1), np.int64)

    def switch(self, site: str | Path | None) -> None:
        """Become another site, or with None the base network; if that fails, nothing changes."""
        self._opened = self._open(site)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes, in the order of the outputs."""
        site = self._opened.site
        names = site.classes if site is not None and site.classes is not None else self._base.facts["classes"]
        return None if names is None else tuple(names)

    @property
    def preprocess(self) -> dict[str, Any] | None:
        """How an image becomes what the network takes: sizes, mean and deviation."""
        return self._steps(self._opened.site)

    @property
    def input(self) -> dict[str, Any]:
        """What the network itself takes: type, layout, channels, and size (None where it is free)."""
        return dict(self._base.facts["input"])

    def _open(self, path: str | Path | None) -> _Opened:
        if path is None:
            return _Opened(self._runtime(self._base.content), None)
        site = SiteFile.read(path)
        content = self._base.at(site, path)
        _refuse_not_numbers(site, path)
        return _Opened(self._runtime(content), site)

    def _runtime(self, content: bytes) -> Any:
        try:
            import onnxruntime
        except ImportError as error:
            raise FewshiftError("running ONNX networks needs onnxruntime: pip install onnxruntime") from error
        options = onnxruntime.SessionOptions()
        if self._threads is not None:
            options.intra_op_num_threads = self._threads
        try:
            return onnxruntime.InferenceSession(content, options, providers=self._providers)
        except Exception as error:  # the runtime has a type for each of its errors
            reason = str(error).splitlines()[0]
            raise FewshiftError(
                f"onnxruntime cannot open {self._base.path} ({reason}): update it, or export again"
            ) from error

    def _steps(self, site: SiteFile | None) -> dict[str, Any] | None:
        steps = site.preprocess if site is not None and site.preprocess is not None else self._base.facts["preprocess"]
        return None if steps is None else dict(steps)

    def _prepared(self, images: NDArray[Any], site: SiteFile | None) -> NDArray[Any]:
        """The images as the graph takes them, or one sentence."""
        images = np.asarray(images)
        takes = self._base.facts["input"]
        if takes["type"] == "float32" and images.dtype == np.uint8 and self._fits(images, "NHWC"):
            images = self._normalised(images, site)
        if str(images.dtype) != takes["type"] or not self._fits(images, takes["layout"]):
            raise FewshiftError(
                f"images are {images.dtype} of shape {images.shape}: give {self._wanted()}"
                + (", or uint8 (N, height, width, channels)" if takes["type"] == "float32" else "")
            )
        return np.ascontiguousarray(images)

    def _fits(self, images: NDArray[Any], layout: str) -> bool:
        takes = self._base.facts["input"]
        height, width = takes["size"]
        wanted = {"C": takes["channels"], "H": height, "W": width}
        return images.ndim == 4 and all(
            wanted.get(axis) in (None, side) for axis, side in zip(layout, images.shape, strict=True)
        )

    def _wanted(self) -> str:
        takes = self._base.facts["input"]
        height, width = takes["size"]
        names = {"N": "N", "C": takes["channels"], "H": height or "height", "W": width or "width"}
        return f"{takes['type']} ({', '.join(str(names[axis]) for axis in takes['layout'])})"

    def _normalised(self, pixels: NDArray[Any], site: SiteFile | None) -> NDArray[np.float32]:
        steps = self._steps(site)
        if steps is None:
            raise FewshiftError(f"{self._base.path} does not say how images are normalised: give {self._wanted()}")
        mean, std = (np.asarray(steps[name], np.float32)[:, None, None] for name in ("mean", "std"))
        scaled = pixels.transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
        return np.asarray((scaled - mean) / std, np.float32)


def _refuse_not_numbers(site: SiteFile, path: str | Path) -> None:
    """An error if a tensor of the site is not a number in places."""
    for name, tensor in site.tensors.items():
        if tensor.type in FLOATS and np.isnan(np.frombuffer(tensor.values, FLOATS[tensor.type])).any():
            raise FewshiftError(f"{path} makes {name} not a number in places: {AGAIN}")
