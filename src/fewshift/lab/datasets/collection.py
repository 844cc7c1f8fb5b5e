"""Collection: the facts about a data set that do not depend on a copy of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fewshift.core.labels import IMAGES, Labels
from fewshift.images.cityscapes import RGB
from fewshift.images.preprocess import Preprocess


@dataclass(frozen=True)
class Collection:
    """One data set: the facts that do not depend on a copy of it."""

    name: str
    title: str
    domains: tuple[str, ...]
    targets: tuple[str, ...]  # the domains that networks are adapted to
    split: str
    classes: tuple[str, ...]  # in the order of the labels; empty where the copy's lists name them
    metric: str  # a name in `core.metrics.METRICS`
    preprocess: Preprocess  # of test images
    recipe: str
    licence: str
    where: str
    layout: str  # how a copy is laid out: a name in `layouts.READERS` or `scene_layouts.PLACES`, or digits
    counts: Mapping[str, int] | None  # images of each domain; None accepts any number
    class_counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # and of each class, where published
    folders: tuple[str, ...] = ()  # other names its folder may have
    skip_rare: bool = False  # whether classes with fewer images than shots are left out of a support
    unnamed: int = 0  # how many classes there are where `classes` is empty
    labels: Labels = IMAGES  # of each image, or of each pixel: such domains are scenes
    palette: tuple[RGB, ...] = ()  # of scenes: a colour for each class
    support_from: Mapping[str, str] = field(default_factory=dict)  # target -> the domain that its support is drawn from
    validation: str = ""  # the published list of a domain's images that networks are not trained on, where there is one

    def support_domain(self, target: str) -> str:
        """The domain that the support of a target is drawn from: the target itself, less the support, by default."""
        return self.support_from.get(target, target)

    @property
    def class_count(self) -> int:
        """How many classes there are."""
        return len(self.classes) or self.unnamed
