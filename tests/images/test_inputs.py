"""Whatever a user has becomes the same support: folders, tensors, arrays, lists, datasets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fewshift import Support
from fewshift.errors import FewshiftError
from fewshift.images import cityscapes
from fewshift.images.folders import labelled_folder
from fewshift.images.inputs import as_labelled, as_support, as_unlabelled
from fewshift.images.scenes import scene_folder
from tests.helpers.networks import make_tiny
from tests.helpers.pictures import AS_IS, pattern, picture, save, save_cityscapes, save_scene

NAMES = ("road", "sky", "tree")
EIGHT = replace(AS_IS, resize=8, crop=8)


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    for index, name in enumerate(("b", "a", "more/c")):
        save_scene(tmp_path / "scenes", name, pattern(9, 12 + index, seed=index))
    return tmp_path / "scenes"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for index in range(12):
        save(tmp_path / "photos" / NAMES[index % 3] / f"{index}.png", picture(9, 9, seed=index))
    return tmp_path / "photos"


# --- one label per image


def test_every_form_of_labelled_images_is_the_same_support(photos: Path) -> None:
    folder = labelled_folder(photos, EIGHT)
    images, labels = folder.tensors()
    pairs = list(zip(images, labels.tolist(), strict=True))
    pictures = [(Image.open(file), label) for file, label in zip(folder.files, folder.labels, strict=True)]
    forms: list[Any] = [photos, str(photos), folder, (images, labels), (images.numpy(), labels.tolist()), pairs]
    forms += [pictures, (list(images), labels.tolist()), Support(images, labels)]
    for form in forms:
        support = as_support(form, EIGHT, classes=NAMES)
        assert torch.equal(support.pictures, images)
        assert support.targets.tolist() == labels.tolist()
        assert (support.classes, support.kind.unit) == (NAMES, "image")


def test_images_of_a_folder_keep_their_files(photos: Path) -> None:
    folder = labelled_folder(photos, EIGHT)
    support = as_support(photos, EIGHT)
    assert support.files == folder.files
    assert support.part(torch.tensor([5, 2])).files == (folder.files[5], folder.files[2])


def test_shots_are_drawn_per_class_and_the_smaller_draw_is_part_of_the_larger(photos: Path) -> None:
    draws = [as_support(photos, EIGHT, shots=k, seed=3) for k in (1, 2, 3)]
    for k, support in enumerate(draws, 1):
        assert support.counts == {0: k, 1: k, 2: k}
    files = [set(support.files or ()) for support in draws]
    assert files[0] < files[1] < files[2]
    assert as_support(photos, EIGHT, shots=2, seed=3).files == draws[1].files
    assert as_support(photos, EIGHT, shots=2, seed=4).files != draws[1].files
    tensors = as_support(labelled_folder(photos, EIGHT).tensors(), shots=2, seed=3)
    assert torch.equal(tensors.pictures, draws[1].pictures)
    with pytest.raises(FewshiftError, match="class 'road' has 4 images, 5 shots"):
        as_support(photos, EIGHT, shots=5)


def test_a_folder_without_preprocessing_asks_for_it(photos: Path) -> None:
    with pytest.raises(FewshiftError, match=r"photos need preprocessing: pass preprocess="):
        as_support(photos)


@pytest.mark.parametrize("source", [7, {"a": 1}, [1, 2, 3]])
def test_what_is_no_labelled_set_is_one_sentence(source: Any) -> None:
    with pytest.raises(FewshiftError, match=f"from {type(source).__name__}: give"):
        as_support(source)
    with pytest.raises(FewshiftError, match="'road' is one word"):
        as_support(source, classes="road")


# --- one label per pixel


def test_a_folder_of_scenes_has_pixel_labels(scenes: Path) -> None:
    support = as_support(scenes, EIGHT, classes=NAMES)
    assert (support.kind.unit, support.classes) == ("pixel", NAMES)
    assert (support.pictures.shape, support.targets.shape) == ((3, 3, 8, 8), (3, 8, 8))
    assert support.targets.dtype == torch.int64
    assert [file.name for file in support.files or ()] == ["a.png", "b.png", "c.png"]


def test_cityscapes_is_a_support_with_its_own_names(tmp_path: Path) -> None:
    save_cityscapes(tmp_path)
    support = as_support(str(tmp_path / "leftImg8bit" / "train"), AS_IS)
    assert (len(support), support.classes) == (1, cityscapes.CLASSES)


def test_scenes_and_pairs_of_different_sizes_keep_them(scenes: Path) -> None:
    folder = scene_folder(scenes, AS_IS, NAMES)
    pairs = [folder[index] for index in range(3)]
    pictures = [
        (Image.open(file), Image.open(labels)) for file, labels in zip(folder.files, folder.label_files, strict=True)
    ]
    for source, steps in ((folder, None), (folder, AS_IS), (pairs, None), (pairs, AS_IS), (pictures, AS_IS)):
        support = as_support(source, steps)
        assert isinstance(support.images, tuple)
        for index, (image, labels) in enumerate(pairs):
            assert torch.equal(support.images[index], image)
            assert torch.equal(support.labels[index], labels)


def test_shots_of_scenes_are_images_in_all(scenes: Path) -> None:
    draws = [as_support(scenes, EIGHT, classes=NAMES, shots=k, seed=1).files or () for k in (1, 2, 3)]
    assert [len(files) for files in draws] == [1, 2, 3]
    assert draws[1][:1] == draws[0]
    assert draws[2][:2] == draws[1]
    with pytest.raises(FewshiftError, match=r"3 labelled images, 5 shots.*add 2 or ask for 3"):
        as_support(scenes, EIGHT, classes=NAMES, shots=5)


def test_scenes_are_read_with_the_steps_passed(scenes: Path) -> None:
    folder = scene_folder(scenes, AS_IS, NAMES)
    assert torch.equal(as_support(folder, EIGHT).images[2], replace(folder, preprocess=EIGHT)[2][0])
    with pytest.raises(FewshiftError, match=r"pass preprocess=fewshift.Preprocess"):
        as_support(folder, lambda image: image)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_list_of_images_and_one_of_label_maps_are_columns(count: int) -> None:
    maps = [pattern(5 + index, 6).astype(np.int32) for index in range(count)]
    images = [torch.rand(3, *labels.shape) for labels in maps]
    as_images = [Image.fromarray(labels.astype(np.uint8)) for labels in maps]
    for source in ((images, maps), [images, as_images], list(zip(images, maps, strict=True))):
        support = as_support(source, classes=NAMES)
        assert len(support) == count
        for index, labels in enumerate(maps):
            assert torch.equal(support.images[index], images[index])
            assert np.array_equal(support.labels[index].numpy(), labels)
    with pytest.raises(FewshiftError, match=f"{count} images and {count + 1} labels"):
        as_support((images, [*maps, maps[0]]), classes=NAMES)


def test_labels_that_do_not_fit_their_image_are_refused() -> None:
    images, labels = torch.rand(2, 3, 5, 6), torch.zeros(2, 4, 6, dtype=torch.long)
    for source in ((images, labels), list(zip(images, labels, strict=True))):
        with pytest.raises(FewshiftError, match="image 0 is 6x5 pixels and its labels are 6x4"):
            as_support(source)
    for floats in ([(images[0], torch.rand(5, 6))], (images, torch.rand(2, 5, 6))):
        with pytest.raises(FewshiftError, match="labels of image 0 are float32, not integers"):
            as_support(floats)
    with pytest.raises(FewshiftError, match="image 0 is 7x5 pixels and its labels are 6x4"):
        as_support([(Image.new("RGB", (7, 5)), Image.new("L", (6, 4)))], EIGHT)


def test_the_outputs_of_a_network_name_the_classes_of_scenes(scenes: Path) -> None:
    pointwise = torch.nn.Conv2d(3, 4, 1)
    assert as_labelled(scenes, AS_IS, network=pointwise).classes == ("0", "1", "2", "3")
    with pytest.raises(FewshiftError, match=r"3 class names .*4 outputs"):
        as_labelled(scenes, AS_IS, NAMES, network=pointwise)
    with pytest.raises(FewshiftError, match="has pixel labels, and the Tiny has one output per image"):
        as_labelled(scenes, AS_IS, NAMES, network=make_tiny())


# --- without labels


def test_label_files_are_not_taken_for_unlabelled_pictures(scenes: Path) -> None:
    for source in (scenes, scene_folder(scenes, AS_IS, NAMES)):
        unlabelled = as_unlabelled(source, EIGHT, None)
        assert unlabelled is not None
        assert len(unlabelled) == 3
        assert unlabelled.batch(torch.arange(3)).shape == (3, 3, 8, 8)


# --- preprocessing of the user's own


def test_a_function_preprocesses_folders_and_files_like_the_steps_it_stands_for(photos: Path) -> None:
    from torchvision import transforms

    steps = replace(EIGHT, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    function = transforms.Compose(
        [
            transforms.Resize(8),
            transforms.CenterCrop(8),
            transforms.ToTensor(),
            transforms.Normalize(steps.mean, steps.std),
        ]
    )
    expected, support = as_support(photos, steps), as_support(photos, function)
    torch.testing.assert_close(support.pictures, expected.pictures)
    assert (support.files, support.classes) == (expected.files, expected.classes)
    pairs = list(zip(support.files or (), support.targets.tolist(), strict=True))
    torch.testing.assert_close(as_support(pairs, function).pictures, expected.pictures)
    unlabelled = as_unlabelled(photos, function, None)
    assert unlabelled is not None
    torch.testing.assert_close(unlabelled.batch(torch.arange(12)), expected_sorted(photos, steps))


def expected_sorted(photos: Path, steps: Any) -> torch.Tensor:
    return torch.stack([steps(Image.open(file)) for file in sorted(photos.rglob("*.png"))])


def test_the_transforms_of_torchvision_and_timm_preprocess_a_folder(photos: Path) -> None:
    from timm.data import create_transform
    from torchvision.models import ResNet18_Weights

    imagenet = replace(AS_IS, resize=256, crop=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    for function in (
        ResNet18_Weights.DEFAULT.transforms(),
        create_transform((3, 224, 224), interpolation="bilinear", crop_pct=0.875),
    ):
        torch.testing.assert_close(as_support(photos, function).pictures, as_support(photos, imagenet).pictures)


@pytest.mark.parametrize(
    ("function", "facts"),
    [
        (lambda image: image, "<lambda> returns a Image: let it return a float tensor"),
        (lambda image: torch.zeros(3, 4, 4, dtype=torch.uint8), "returns uint8 values: let it return a float tensor"),
        (lambda image: image["pixels"], r"<lambda> failed \(.*\): let it take a PIL image"),
    ],
)
def test_a_function_that_makes_no_float_tensor_is_one_sentence_with_the_file(
    photos: Path, function: Any, facts: str
) -> None:
    with pytest.raises(FewshiftError, match=rf"road/0\.png: preprocess={'<lambda> ' * ('<' not in facts)}.*{facts}"):
        as_support(photos, function)
    with pytest.raises(FewshiftError, match="preprocess='resnet' is no preprocessing"):
        as_support(photos, "resnet")  # type: ignore[arg-type]


def test_a_random_function_is_refused_and_leaves_random_states_alone(photos: Path) -> None:
    import random

    from timm.data import create_transform
    from torchvision import transforms

    flip = transforms.Compose([transforms.ToTensor(), transforms.RandomHorizontalFlip()])
    training = create_transform((3, 8, 8), is_training=True)
    for function in (flip, training, lambda image: EIGHT(image) * np.random.rand()):
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        with pytest.raises(
            FewshiftError, match=r"0\.png: preprocess=.* is random: pass the preprocessing of evaluation"
        ):
            as_support(photos, function)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_labels_of_pixels_need_steps_that_know_them(scenes: Path) -> None:
    with pytest.raises(FewshiftError, match=r"labels of pixels .*pass preprocess=fewshift\.Preprocess"):
        as_support(scenes, lambda image: image, classes=NAMES)


# --- batches


class Stream(torch.utils.data.IterableDataset[Any]):
    """Pairs without numbers."""

    def __init__(self, pairs: list[Any]) -> None:
        self.pairs = pairs

    def __iter__(self) -> Any:
        return iter(self.pairs)


def test_a_loader_and_any_iterable_of_batches_are_their_images(photos: Path) -> None:
    images, labels = labelled_folder(photos, EIGHT).tensors()
    pairs = list(zip(images, labels, strict=True))
    batches = list(zip(images.split(5), labels.split(5), strict=True))
    before = torch.get_rng_state()
    loader: Any = torch.utils.data.DataLoader(pairs, 5)  # type: ignore[arg-type, var-annotated]
    for source, count in ((loader, 12), (batches, 12), (iter(batches), 12), (batches[:2], 10), (Stream(pairs), 12)):
        support = as_support(source, EIGHT, classes=NAMES)
        assert torch.equal(support.pictures, images[:count])
        assert support.targets.tolist() == labels[:count].tolist()
    assert torch.equal(torch.get_rng_state(), before)
    unlabelled = as_unlabelled(loader, None, None)
    assert unlabelled is not None
    assert torch.equal(unlabelled.batch(torch.arange(12)), images)


def test_a_shuffled_loader_is_read_in_the_same_order_each_time(photos: Path) -> None:
    images, labels = labelled_folder(photos, EIGHT).tensors()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 5, shuffle=True)
    first = as_support(loader).targets
    torch.rand(3)
    assert torch.equal(as_support(loader).targets, first)
    assert sorted(first.tolist()) == sorted(labels.tolist())


def test_batches_of_scenes_have_pixel_labels() -> None:
    images, maps = torch.rand(3, 3, 5, 6), torch.randint(0, 3, (3, 5, 6))
    support = as_support([(images[:2], maps[:2]), (images[2:], maps[2:])])
    assert support.kind.unit == "pixel"
    assert torch.equal(support.targets, maps)


def test_a_batch_without_as_many_labels_is_counted() -> None:
    with pytest.raises(FewshiftError, match="batch 1 is no images with as many labels"):
        as_support([(torch.rand(2, 3, 4, 4), torch.tensor([0, 1])), (torch.rand(3, 3, 4, 4), torch.tensor([0]))])


# --- names of files


def test_an_image_is_named_by_its_file_where_that_is_known(photos: Path, tmp_path: Path) -> None:
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(str(photos), transform=EIGHT)
    assert as_support(dataset).files == tuple(Path(path) for path, _ in dataset.samples)
    pictures = [(Image.open(file), 0) for file in sorted(photos.rglob("*.png"))]
    assert as_support(pictures, EIGHT).files == tuple(sorted(photos.rglob("*.png")))

    def broken(image: Image.Image) -> torch.Tensor:
        return EIGHT(image) / 0

    with pytest.raises(FewshiftError, match=r"road/0\.png contains NaN or infinity"):
        as_support(photos, broken)
    unlabelled = as_unlabelled(photos, broken, None)
    assert unlabelled is not None
    with pytest.raises(FewshiftError, match=r"road/3\.png contains NaN or infinity"):
        unlabelled.batch(torch.tensor([1]))
    save(tmp_path / "sizes" / "a.png", picture(9, 9))
    save(tmp_path / "sizes" / "b.png", picture(7, 9))
    mixed = as_unlabelled(tmp_path / "sizes", AS_IS, None)
    assert mixed is not None
    with pytest.raises(FewshiftError, match=r"a\.png \(3, 9, 9\) and .*b\.png \(3, 9, 7\)"):
        mixed.batch(torch.arange(2))
    with (
        Image.open(tmp_path / "sizes" / "a.png") as image,
        pytest.raises(FewshiftError, match=r"a\.png is 9x9 pixels and its labels are 6x4"),
    ):
        as_support([(image, Image.new("L", (6, 4)))], AS_IS)


@pytest.mark.parametrize("rows", [["a.png", "b.png"], [("a.png", 0, 1), ("b.png", 1, 1)]])
def test_paths_without_labels_are_one_sentence(rows):
    with pytest.raises(FewshiftError, match=r"a\.png.*\(path, label\)"):
        as_support(rows, AS_IS, None, None)
