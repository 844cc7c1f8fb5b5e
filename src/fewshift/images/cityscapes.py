"""The 19 evaluation classes of Cityscapes: names, colours, and the numbers that its label files store."""

from __future__ import annotations

from fewshift.core.losses import IGNORE

RGB = tuple[int, int, int]

_TABLE: tuple[tuple[str, RGB, int], ...] = (
    ("road", (128, 64, 128), 7),
    ("sidewalk", (244, 35, 232), 8),
    ("building", (70, 70, 70), 11),
    ("wall", (102, 102, 156), 12),
    ("fence", (190, 153, 153), 13),
    ("pole", (153, 153, 153), 17),
    ("traffic light", (250, 170, 30), 19),
    ("traffic sign", (220, 220, 0), 20),
    ("vegetation", (107, 142, 35), 21),
    ("terrain", (152, 251, 152), 22),
    ("sky", (70, 130, 180), 23),
    ("person", (220, 20, 60), 24),
    ("rider", (255, 0, 0), 25),
    ("car", (0, 0, 142), 26),
    ("truck", (0, 0, 70), 27),
    ("bus", (0, 60, 100), 28),
    ("train", (0, 80, 100), 31),
    ("motorcycle", (0, 0, 230), 32),
    ("bicycle", (119, 11, 32), 33),
)
CLASSES = tuple(name for name, _, _ in _TABLE)
PALETTE = tuple(colour for _, colour, _ in _TABLE)
TRAIN_IDS = {number: number for number in range(len(CLASSES))}  # labels that are class numbers already
# 0-6 are void, 9 parking, 10 rail track, 14 guard rail, 15 bridge, 16 tunnel, 18 group of poles, 29 caravan, 30 trailer
CITYSCAPES_IDS = dict.fromkeys(range(34), IGNORE) | {label: number for number, (_, _, label) in enumerate(_TABLE)}
