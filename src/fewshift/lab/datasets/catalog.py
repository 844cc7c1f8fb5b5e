"""The data sets of the benchmark: what each consists of, where it is found, how it is judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fewshift.core.labels import PIXELS
from fewshift.errors import FewshiftError
from fewshift.images import cityscapes
from fewshift.images.preprocess import IMAGENET, Preprocess
from fewshift.lab.datasets import digits, street
from fewshift.lab.datasets.collection import Collection


def find_collection(name: str) -> Collection:
    """The collection of that name, or one sentence with those there are."""
    if name not in COLLECTIONS:
        raise FewshiftError(f"unknown data set {name!r}: use one of {', '.join(COLLECTIONS)}")
    return COLLECTIONS[name]


def describe() -> list[dict[str, Any]]:
    """One row for each collection, as plain values."""
    return [
        {
            "name": collection.name,
            "title": collection.title,
            "domains": list(collection.domains),
            "targets": list(collection.targets),
            "classes": collection.class_count,
            "images": sum(collection.counts.values()) if collection.counts else None,
            "metric": collection.metric,
            "support_from": dict(collection.support_from),
            "split": collection.split,
            "recipe": collection.recipe,
            "licence": collection.licence,
            "where": collection.where,
        }
        for collection in COLLECTIONS.values()
    ]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


STANDARD = replace(IMAGENET, resize=224)
ONE_LEFT_OUT = "leave one domain out: all images of the target, less the support"
PAIRS = "one source domain and one target domain: all images of the target, less the support"
ERM = "SGD, rate 1e-3 with cosine decay, momentum 0.9, weight decay 5e-4"
WHOLE = replace(IMAGENET, resize=None, crop=None)
FROM_TRAIN = "all images of val; the support is drawn from train"
ISW = (
    "DeepLabV3+ with ResNet-50, published with ISW (RobustNet) for 3 seeds: GTAV, crops of 768, SGD, rate 0.01 with "
    "polynomial decay, 40,000 steps of 16 images"
)


def _street(**facts: Any) -> Collection:
    """A data set of street scenes with the 19 classes of Cityscapes; `facts` add to what they share, or replace it."""
    shared: dict[str, Any] = {
        "targets": ("val",),
        "classes": cityscapes.CLASSES,
        "labels": PIXELS,
        "palette": cityscapes.PALETTE,
        "metric": "mean_iou",
        "preprocess": WHOLE,
        "recipe": ISW,
        "support_from": {"val": "train"},
    }
    return Collection(**shared | facts)


_DESCRIBED = (
    Collection(
        name="pacs",
        title="PACS",
        domains=("art_painting", "cartoon", "photo", "sketch"),
        targets=("art_painting", "cartoon", "photo", "sketch"),
        split=ONE_LEFT_OUT,
        classes=_words("dog elephant giraffe guitar horse house person"),
        preprocess=STANDARD,
        recipe=f"ResNet-18 from ImageNet, train lists of the three other domains, 150 epochs of 2 x 64 images, {ERM}",
        licence="none stated; for research",
        where="get the images from the page of 'Deeper, Broader and Artier Domain Generalization' (Li et al. 2017)",
        counts={"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
        class_counts={
            "art_painting": (379, 255, 285, 184, 201, 295, 449),
            "cartoon": (389, 457, 346, 135, 324, 288, 405),
            "photo": (189, 202, 182, 186, 199, 280, 432),
            "sketch": (772, 740, 753, 608, 816, 80, 160),
        },
        folders=("kfold",),
        validation="{}_crossval_kfold.txt",
    ),
    Collection(
        name="visda",
        title="VisDA-2017",
        domains=("train", "validation"),
        targets=("validation",),
        split="synthetic images (train) to real ones (validation): all of validation, less the support",
        classes=_words("aeroplane bicycle bus car horse knife motorcycle person plant skateboard train truck"),
        metric="macro_recall",
        preprocess=STANDARD,
        recipe="ResNet-101, the checkpoint published with CSG (contrastive syn-to-real generalisation)",
        licence="none stated; for research, the real images are from COCO under Flickr's terms",
        where="get train.tar and validation.tar of the classification track from the VisDA-2017 challenge page",
        counts={"train": 152_397, "validation": 55_388},
        folders=("visda2017", "visda17", "visda-c"),
    ),
    Collection(
        name="office31",
        title="Office-31",
        domains=("amazon", "dslr", "webcam"),
        targets=("amazon", "dslr", "webcam"),
        split=PAIRS,
        classes=_words(
            "back_pack bike bike_helmet bookcase bottle calculator desk_chair desk_lamp desktop_computer file_cabinet "
            "headphones keyboard laptop_computer letter_tray mobile_phone monitor mouse mug paper_notebook pen phone "
            "printer projector punchers ring_binder ruler scissors speaker stapler tape_dispenser trash_can"
        ),
        metric="macro_recall",
        preprocess=STANDARD,
        recipe=f"ResNet-50 from ImageNet, all of the source domain, 50 epochs of batches of 32, {ERM}, RandAugment",
        licence="none stated; for research",
        where="get the images from the page of 'Adapting Visual Category Models to New Domains' (Saenko et al. 2010)",
        counts={"amazon": 2817, "dslr": 498, "webcam": 795},
        folders=("office", "domain_adaptation_images"),
    ),
    Collection(
        name="officehome",
        title="Office-Home",
        domains=("Art", "Clipart", "Product", "Real World"),
        targets=("Art", "Clipart", "Product", "Real World"),
        split=PAIRS,
        classes=_words(
            "Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair Clipboards "
            "Computer Couch Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flipflops Flowers Folder Fork "
            "Glasses Hammer Helmet Kettle Keyboard Knives Lamp_Shade Laptop Marker Monitor Mop Mouse Mug Notebook Oven "
            "Pan Paper_Clip Pen Pencil Postit_Notes Printer Push_Pin Radio Refrigerator Ruler Scissors Screwdriver "
            "Shelf Sink Sneakers Soda Speaker Spoon TV Table Telephone ToothBrush Toys Trash_Can Webcam"
        ),
        preprocess=STANDARD,
        recipe=f"ResNet-50 from ImageNet, all of the source domain, 50 epochs of batches of 64, {ERM}, RandAugment",
        licence="for non-commercial research and teaching",
        where="get the images from the Office-Home page of 'Deep Hashing Network' (Venkateswara et al. 2017)",
        counts={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357},
        folders=("OfficeHomeDataset_10072016",),
    ),
    Collection(
        name="camelyon17",
        title="Camelyon17-WILDS",
        domains=tuple(f"hospital{number}" for number in range(5)),
        targets=("hospital2",),
        split="hospitals 0, 3 and 4 train, 1 validates, 2 is the test hospital: all its patches, less the support",
        classes=("normal", "tumor"),
        preprocess=replace(IMAGENET, resize=96, crop=96),
        recipe="DenseNet-121 from scratch, published by WILDS for 10 seeds: SGD, rate 1e-3, no augmentation",
        licence="CC0 1.0",
        where="get camelyon17_v1.0 from the WILDS data page",
        layout="camelyon17",
        counts=dict(
            zip((f"hospital{number}" for number in range(5)), (59_436, 34_904, 85_054, 129_838, 146_722), strict=True)
        ),
        folders=("camelyon17_v1.0",),
    ),
    Collection(
        name="iwildcam",
        title="iWildCam2020-WILDS",
        domains=("train", "id_val", "id_test", "val", "test"),
        targets=("test",),
        split="by camera: the photographs of the test cameras, less the support",
        classes=tuple(str(number) for number in range(182)),
        metric="macro_f1",
        preprocess=replace(IMAGENET, resize=448, crop=448, squeeze=True),  # as WILDS does
        recipe="ResNet-50 from ImageNet, published by WILDS for 3 seeds: Adam, rate 3e-5, 12 epochs, no augmentation",
        licence="Community Data License Agreement, Permissive, 1.0",
        where="get iwildcam_v2.0 from the WILDS data page",
        layout="iwildcam",
        counts={"train": 129_809, "id_val": 7314, "id_test": 8154, "val": 14_961, "test": 42_791},
        folders=("iwildcam_v2.0",),
        skip_rare=True,
    ),
    Collection(
        name="domainnet",
        title="DomainNet",
        domains=("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
        targets=("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
        split=PAIRS,
        classes=(),
        unnamed=345,
        preprocess=STANDARD,
        recipe=f"not in the paper; as for Office-Home: ResNet-50 from ImageNet, one source domain, {ERM}, RandAugment",
        licence="for non-commercial research",
        where="get the images and the train and test lists of the cleaned version from the DomainNet page of "
        "'Moment Matching for Multi-Source Domain Adaptation' (Peng et al. 2019)",
        layout="lists",
        counts={
            "clipart": 48_129,
            "infograph": 51_605,
            "painting": 72_266,
            "quickdraw": 172_500,
            "real": 172_947,
            "sketch": 69_128,
        },
    ),
    Collection(
        name="digits",
        title="Digits: MNIST and UCI",
        domains=("mnist", "uci"),
        targets=("mnist", "uci"),
        split="from either, where 4,000 of 5,000 MNIST digits or 1,437 of 1,797 of UCI train, to the other: all its "
        "digits, less the support",
        classes=tuple(str(digit) for digit in range(10)),
        preprocess=digits.PREPROCESS,
        recipe="a narrow ResNet of ten layers: `python -m fewshift.lab.datasets.digits`, SGD, one cycle, 12 epochs "
        "(UCI: 34)",
        licence="MNIST CC BY-SA 3.0, UCI CC BY 4.0",
        where="nothing to get: both come with the library's dependencies",
        layout="digits",
        counts={"mnist": 5000, "uci": 1797},
    ),
    _street(
        name="gtav",
        title="GTAV",
        domains=("train", "val", "test"),
        split="the published parts of the game's images: the networks that are adapted were trained on train",
        licence="for research and teaching; see its page",
        where="get images, labels and split.mat (in read_mapping.zip) from the page of 'Playing for Data' (Richter et "
        "al. 2016)",
        layout="gtav",
        counts={"train": 12_403, "val": 6382, "test": 6181},
        folders=("gta5", "gta"),
    ),
    _street(
        name="cityscapes",
        title="Cityscapes",
        domains=("train", "val"),
        split=FROM_TRAIN,
        licence="for non-commercial use, after registration; see its page",
        where="get leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip from the Cityscapes page",
        layout="cityscapes",
        counts={"train": 2975, "val": 500},
    ),
    _street(
        name="bdd100k",
        title="BDD100K, segmentation",
        domains=("train", "val"),
        split=FROM_TRAIN,
        licence="for research and teaching without profit; see its page",
        where="get the 10K images and the labels for semantic segmentation from the BDD100K page",
        layout="bdd100k",
        counts={"train": 7000, "val": 1000},
        folders=("bdd",),
    ),
    _street(
        name="mapillary",
        title="Mapillary Vistas",
        domains=("train", "val"),
        split=FROM_TRAIN,
        preprocess=Preprocess(1536, 1536, IMAGENET.mean, IMAGENET.std, "bicubic", side="height"),  # as RobustNet does
        licence="CC BY-NC-SA for the research edition; see its page",
        where="get the research edition, labels of version 1.2 with 66 ids, from the Mapillary Vistas page",
        layout="mapillary",
        counts={"train": 18_000, "val": 2000},
        folders=("mapillary_vistas", "vistas", "mapillary-vistas-dataset_public_v1.2"),
    ),
    _street(
        name="synthia",
        title="SYNTHIA-RAND-CITYSCAPES",
        domains=("train", "val"),
        split=f"{FROM_TRAIN}; both parts are lists published with RobustNet",
        licence="CC BY-NC-SA 3.0",
        where="get SYNTHIA-RAND-CITYSCAPES from the SYNTHIA page, and train.txt and val.txt, which are split_data of "
        "RobustNet (Choi et al. 2021)",
        layout="synthia",
        counts={"train": 6580, "val": 2820},
        folders=("RAND_CITYSCAPES", "SYNTHIA-RAND-CITYSCAPES", "SYNTHIA_RAND_CITYSCAPES"),
    ),
    Collection(
        name="camvid",
        title="CamVid",
        domains=("day", "dusk"),
        targets=("day", "dusk"),
        split="three sequences by day and one at dusk, either to the other: all images of the target, less the support",
        classes=street.CAMVID_CLASSES,
        labels=PIXELS,
        palette=street.CAMVID_PALETTE,
        metric="mean_iou",
        preprocess=WHOLE,
        recipe="not in the paper; any network that is trained on the other domain",
        licence="see its page",
        where="get 701_StillsRaw_full.zip and LabeledApproved_full.zip from the CamVid page of 'Semantic Object "
        "Classes in Video' (Brostow et al. 2009)",
        layout="camvid",
        counts={"day": 577, "dusk": 124},
    ),
    Collection(
        name="streets",
        title="CARLA to Cityscapes",
        domains=("carla", "cityscapes"),
        targets=("cityscapes",),
        split="frames of a simulator to photographs of streets, small: all images of the target, less the support",
        classes=street.STREETS_CLASSES,
        labels=PIXELS,
        palette=street.STREETS_PALETTE,
        metric="mean_iou",
        preprocess=WHOLE,
        recipe="not in the paper, whose simulator is GTAV; any network that is trained on carla",
        licence="see their pages; research",
        where="render frames of CARLA and reduce Cityscapes' validation images; labels are Cityscapes' training ids",
        layout="streets",
        counts={"carla": 1060, "cityscapes": 250},
    ),
)

COLLECTIONS: dict[str, Collection] = {collection.name: collection for collection in _DESCRIBED}
