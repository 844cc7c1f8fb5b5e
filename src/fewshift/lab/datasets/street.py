"""How each street-scene data set numbers or paints its classes.

All but CamVid are evaluated on the 19 classes of Cityscapes. Labels without a counterpart there are ignored, as in the
code published with RobustNet (Choi et al. 2021), whose networks the paper adapts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fewshift.core.losses import IGNORE
from fewshift.images.cityscapes import CLASSES, PALETTE, RGB


def _numbered(total: int, ids: Sequence[int | tuple[int, ...]]) -> Mapping[int, int]:
    """Map each raw id below `total` to its class; `ids` has those of each class, and the others are ignored."""
    groups = [group if isinstance(group, tuple) else (group,) for group in ids]
    return dict.fromkeys(range(total), IGNORE) | {raw: number for number, group in enumerate(groups) for raw in group}


# GTAV has the ids and the colours of Cityscapes, and a few more for what is not evaluated
GTAV_COLOURS = {colour: number for number, colour in enumerate(PALETTE)}

# 0 void, 13 parking, 14 road work and 22 lane marking are ignored, the last as is usual although it lies on the road;
# terrain, truck and train have ids but are not among the 16 classes for which results on SYNTHIA are published
SYNTHIA_IDS = _numbered(23, (3, 4, 2, 21, 5, 7, 15, 9, 6, 16, 1, 10, 17, 8, 18, 19, 20, 12, 11))

MAPILLARY_IDS = _numbered(
    66,
    (
        (13, 24, 41),  # road, lane marking (general; that of a crosswalk is ignored), manhole
        (2, 15),  # curb, sidewalk
        17,  # building
        6,  # wall
        3,  # fence
        (45, 47),  # pole, utility pole
        48,  # traffic light
        50,  # traffic sign, its front
        30,  # vegetation
        29,  # terrain
        27,  # sky
        19,  # person
        (20, 21, 22),  # bicyclist, motorcyclist, other rider
        55,  # car
        61,  # truck
        54,  # bus
        58,  # on rails
        57,  # motorcycle
        52,  # bicycle
    ),
)

CAMVID_IDS = _numbered(12, range(11))  # 11 is void

# the simulator CARLA has no rider, truck, bus, train, motorcycle or bicycle: scored is what both places have
STREETS_SHARED = (*range(12), 13)
STREETS_IDS = _numbered(len(PALETTE), STREETS_SHARED)
STREETS_CLASSES = tuple(CLASSES[number] for number in STREETS_SHARED)
STREETS_PALETTE = tuple(PALETTE[number] for number in STREETS_SHARED)

# the 32 labels of CamVid, grouped as for SegNet (Badrinarayanan et al. 2017); the first of a group is its colour here
_CAMVID_GROUPS: dict[str, tuple[RGB, ...]] = {
    "sky": ((128, 128, 128),),
    "building": ((128, 0, 0), (192, 0, 128), (0, 128, 64), (64, 0, 64), (64, 192, 0)),  # archway, bridge, tunnel, wall
    "pole": ((192, 192, 128), (0, 0, 64)),  # column or pole, traffic cone
    "road": ((128, 64, 128), (128, 0, 192), (192, 0, 64)),  # lane markings of drivers and of others
    "pavement": ((0, 0, 192), (64, 192, 128), (128, 128, 192)),  # sidewalk, parking block, road shoulder
    "tree": ((128, 128, 0), (192, 192, 0)),  # other vegetation
    "sign": ((192, 128, 128), (128, 128, 64), (0, 64, 64)),  # or symbol, other text, traffic light
    "fence": ((64, 64, 128),),
    "car": ((64, 0, 128), (64, 128, 192), (192, 128, 192), (192, 64, 128), (128, 64, 64)),  # SUV, truck, train, other
    "pedestrian": ((64, 64, 0), (192, 128, 64), (64, 0, 192), (64, 128, 64)),  # child, cart or pram, animal
    "bicyclist": ((0, 128, 192), (192, 0, 192)),  # motorcycle or scooter
}
CAMVID_CLASSES = tuple(_CAMVID_GROUPS)
CAMVID_PALETTE = tuple(colours[0] for colours in _CAMVID_GROUPS.values())
CAMVID_COLOURS = {colour: number for number, colours in enumerate(_CAMVID_GROUPS.values()) for colour in colours}
CAMVID_COLOURS[0, 0, 0] = IGNORE
CAMVID_SEQUENCES = {"day": ("0006R0", "0016E5", "Seq05VD"), "dusk": ("0001TP",)}  # what file names begin with
