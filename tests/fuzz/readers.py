"""Everything that reads a file of somebody else's, with files that are right to begin from."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fewshift import FewshiftError
from fewshift.deploy.class_table import Columns, _whole_rows
from fewshift.images.folders import read_tensor
from fewshift.images.label_files import Encoding, read_palette
from fewshift.images.label_lists import read_label_list
from fewshift.images.preprocess import IMAGENET, Preprocess
from fewshift.lab.bench.features import load_grid
from fewshift.lab.bench.page import read_run
from fewshift.lab.bench.record import Records
from fewshift.lab.datasets.layouts import read_list
from fewshift.models.card_files import unknown_keys
from fewshift.models.cards import read_card
from fewshift.studio.labels_store import LABELLED, LabelStore
from tests.fuzz import networks
from tests.fuzz.fuzzing import FuzzedReader, GoodFile
from tests.fuzz.mutations import changed_bytes, changed_json, changed_lines, changed_text
from tests.helpers import runs
from tests.helpers.pictures import picture, save

SMALL = Preprocess(8, 8, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))


def each(*steps: Callable[[], Any]) -> None:
    """Try all of them; then raise the first sentence that one of them said."""
    sentences = []
    for step in steps:
        try:
            step()
        except FewshiftError as error:
            sentences.append(error)
    if sentences:
        raise sentences[0]


# --- cards


CARD = {
    "arch": "timm:resnet18", "classes": ["ant", "bee"], "algorithm": {"name": "erm"}, "resize": 256, "crop": 224,
    "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2], "interpolation": "bilinear", "squeeze": False, "side": "shorter",
    "sources": ["art"], "recipe": {"held_out": 0.1}, "validation": "val.txt", "seed": 0, "history": [{"loss": 1.0}],
}  # fmt: skip
TIMM = {
    "architecture": "resnet18", "num_classes": 2, "label_names": ["ant", "bee"],
    "pretrained_cfg": {"input_size": [3, 224, 224], "crop_pct": 0.875, "mean": [0.5] * 3, "std": [0.5] * 3,
                       "interpolation": "bicubic", "crop_mode": "center"},
}  # fmt: skip
HUGGING_FACE = {"architectures": ["ResNetForImageClassification"], "id2label": {"0": "ant", "1": "bee"}}
PROCESSOR = {
    "size": {"shortest_edge": 224}, "crop_pct": 0.875, "do_resize": True, "do_normalize": True, "resample": 3,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255, "crop_size": {"height": 8, "width": 8},
    "do_center_crop": True,
}  # fmt: skip


def cards(folder: Path) -> list[GoodFile]:
    hub = folder / "hub"
    hub.mkdir()
    (hub / "config.json").write_text(json.dumps(HUGGING_FACE))
    named = {
        "w.json": CARD,
        "timm/config.json": TIMM,
        "hf/config.json": HUGGING_FACE,
        "hub/preprocessor_config.json": PROCESSOR,
    }
    return [GoodFile(name, json.dumps(card).encode(), changed_json) for name, card in named.items()]


def read_card_file(path: Path) -> None:
    card = read_card(path.with_name("config.json") if path.name == "preprocessor_config.json" else path)
    card.over(IMAGENET).to_json()
    unknown_keys({key: 1 for key, _ in card.misspelt})


# --- benchmark runs


def records(folder: Path) -> list[GoodFile]:
    runs.fill(folder, "plain", runs.PLAIN)
    runs.fill(folder, "features", runs.FEATURES, runs.embedded)
    lines = (folder / "records.jsonl").read_bytes().splitlines()
    lccs = [line for line in lines if b'"lccs"' in line]
    kept = [*lines[:2], *lccs[:2], lines[-1]]
    judged = json.loads(kept[0])
    judged["result"]["trust"] = {
        "gain": {"point": 1.0, "low": 0.1, "high": 2.0}, "accepted": True, "strength": 1.5, "reason": "",
        "accuracy": {"source": 0.5, "candidate": 0.6, "returned": 0.6},
    }  # fmt: skip
    kept[0] = json.dumps(judged).encode()
    return [GoodFile("records.jsonl", b"\n".join(kept) + b"\n", changed_lines)]


def read_records(path: Path) -> None:
    stored = Records(path.parent)
    stored.read()
    if not stored.unreadable:  # otherwise the report is that of good lines
        with runs.undrawn():
            read_run(path.parent)


def grids(_: Path) -> list[GoodFile]:
    texts = {"plain": runs.PLAIN, "batches": runs.BATCHES, "objective": runs.OBJECTIVE, "features": runs.FEATURES}
    return [GoodFile(f"{name}.toml", text.encode(), changed_text) for name, text in texts.items()]


def read_grid(path: Path) -> None:
    for cell in load_grid(path).cells():
        assert cell.key


# --- images


def images(_: Path) -> list[GoodFile]:
    modes = {
        "RGB": ("png", "jpeg", "webp", "bmp", "tiff", "ppm"),
        "L": ("png", "gif"),
        "P": ("png", "gif"),
        "LA": ("png",),
    }
    files = []
    for mode, formats in modes.items():
        for kind in formats:
            buffer = io.BytesIO()
            picture(20, 14).convert(mode).save(buffer, kind)
            files.append(GoodFile(f"{mode}.{kind}", buffer.getvalue(), changed_bytes))
    buffer = io.BytesIO()
    Image.fromarray(np.arange(280, dtype=np.uint16).reshape(14, 20) * 200).save(buffer, "png")
    return [*files, GoodFile("deep.png", buffer.getvalue(), changed_bytes)]


def read_image(path: Path) -> None:
    def labels() -> None:
        stored = Encoding({number: number for number in range(256)}, strict=False, first_channel=True).read(path)
        assert stored.dtype == np.uint8

    each(lambda: read_tensor(path, SMALL), labels)


# --- lists of labels


TASKS = [
    {"id": 7, "data": {"image": "/data/upload/1/0123abcd-a.png"}, "annotations": [
        {"result": [{"type": "choices", "value": {"choices": ["cat"]}}], "was_cancelled": False}]},
    {"id": 8, "data": {"image": "s3://box/b.png"}, "annotations": []},
]  # fmt: skip
MINIMAL = [{"id": 7, "image": "a.png", "choice": "cat"}, {"id": 8, "image": "b.png", "choice": {"choices": ["dog"]}}]
COCO = {
    "images": [{"id": 1, "file_name": "a.png"}, {"id": 2, "file_name": "b.png"}],
    "annotations": [{"image_id": 1, "category_id": 3}, {"image_id": 2, "category_id": 4}],
    "categories": [{"id": 3, "name": "cat"}, {"id": 4, "name": "dog"}],
}


def label_lists(folder: Path) -> list[GoodFile]:
    for name in ("a.png", "b.png"):
        save(folder / name)
    tables = {
        "t.csv": "path,label\na.png,cat\nb.png,dog\n",
        "t.tsv": "a.png\tcat\nb.png\tdog\n",
        "t.txt": 'a.png;"c;t"\nb.png;d\n',
    }
    exports = {"tasks.json": TASKS, "minimal.json": MINIMAL, "coco.json": COCO}
    return [
        *(GoodFile(name, text.encode(), changed_text) for name, text in tables.items()),
        *(GoodFile(name, json.dumps(value).encode(), changed_json) for name, value in exports.items()),
    ]


def text_files(_: Path) -> list[GoodFile]:
    texts = {"palette.txt": "128 64 128 road\n# note\n70 70 70 building\n", "list.txt": "a/1.png 1\nb/2.png 2\n"}
    return [GoodFile(name, text.encode(), changed_text) for name, text in texts.items()]


def read_text_file(path: Path) -> None:
    if path.name == "palette.txt":
        read_palette(path)
    else:
        read_list(path, path.parent, 3, 1)


# --- the studio's journal, and tables of predictions


def journals(folder: Path) -> list[GoodFile]:
    store = LabelStore(folder / "first")
    store.change("a.jpg", LABELLED, "cat", base=0, tab="one")
    store.change("b.jpg", "skipped", None, base=0, tab="two")
    store.undo("one")
    store.close()
    return [GoodFile("labels.jsonl", store.path.read_bytes(), changed_lines)]


def read_journal(path: Path) -> None:
    store = LabelStore(path.parent)
    try:
        store.labels()
        store.undo("two")
    finally:
        store.close()


COLUMNS = Columns(("ant", "bee"), 1, False)


def tables(_: Path) -> list[GoodFile]:
    rows = [",".join(COLUMNS.header), "a.jpg,ant" + ",0.5" * (len(COLUMNS.header) - 2), '"b, c.jpg",bee,0.25']
    return [GoodFile("out.csv", "\n".join(rows).encode() + b"\n", changed_text)]


READERS = (
    FuzzedReader("deltas", networks.deltas, networks.read_delta, share=3),
    FuzzedReader("weights", networks.weights, networks.read_weights, share=3),
    FuzzedReader("sites", networks.site_files, networks.read_site, share=2),
    FuzzedReader("cards", cards, read_card_file),
    FuzzedReader("records", records, read_records, share=2),
    FuzzedReader("grids", grids, read_grid, share=2),
    FuzzedReader("images", images, read_image, share=3),
    FuzzedReader("label-lists", label_lists, read_label_list, share=2),
    FuzzedReader("text-files", text_files, read_text_file, share=0.5),
    FuzzedReader("journals", journals, read_journal),
    FuzzedReader("tables", tables, lambda path: _whole_rows(path, COLUMNS), share=0.5),
)
