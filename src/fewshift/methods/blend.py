"""blend, blend + head, blend + all: what `auto` is made of, each a method of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from fewshift.core.adaptable import refuse_without_gradients
from fewshift.core.method import Fitted, Method, Needs
from fewshift.core.moments import merged
from fewshift.core.network import Network
from fewshift.core.support import Target
from fewshift.errors import FewshiftError
from fewshift.methods._blending import Blended, blended
from fewshift.methods._refining import LEAST_MIX, Refinement, Steps


@dataclass(frozen=True)
class Blend(Method):
    """The source's statistics blended with the target's, in one share v for all layers.

    v is chosen by the labels of the support, each image normalised with the statistics of the others, under the best
    temperature. Unlabelled images, if there are any, share in the statistics, unless they lack classes.

    - prior: what v = 0 and v = 1 cost, in nats, against v = 0.2; with few images it decides, with many it gives way.
    """

    name: ClassVar[str] = "blend"
    paper: ClassVar[str] = "-"
    needs: ClassVar[Needs] = Needs.SUPPORT
    changes: ClassVar[str] = "BatchNorm weight and bias (statistics where a layer has none)"
    verified: ClassVar[str] = (
        "`tests/methods/test_blend.py`: v is that of a naive loop that leaves each image out; it has no original"
    )

    prior: float = 2.0

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Search v and write the blend into the network."""
        refinement, used = refined(network, target, self.name, self.prior, Steps(0, 0.0, target.cost, seed))
        return fitted(refinement.blend, {}, used)


@dataclass(frozen=True)
class Refining(Method):
    """What is built on a blend: settings of the search and of gradient steps."""

    paper: ClassVar[str] = "-"
    needs: ClassVar[Needs] = Needs.SUPPORT

    prior: float = Blend.prior
    epochs: int = 8
    lr: float = 2e-3

    def refined(self, network: nn.Module | Network, target: Target, seed: int) -> tuple[Refinement, dict[str, Any]]:
        """The blend to build on, and what became of unlabelled images."""
        steps = Steps(self.epochs, self.lr, target.cost, seed)
        return refined(network, target, self.name, self.prior, steps)


@dataclass(frozen=True)
class BlendHead(Refining):
    """A blend, and a mixture of the source's head with one whose rows are the classes' directions.

    From two images per class on, held-out labels choose the share of the source's head that stays, and the rows are
    trained further, held near their start. Unlabelled images add to a row by the probability of its class, unless they
    lack classes. With pixel labels the head is trained by SGD.

    - prior: that of `blend`.
    - epochs, lr: of the head with pixel labels, at ten times the rate.
    """

    name: ClassVar[str] = "blend-head"
    changes: ClassVar[str] = Blend.changes + "; the head"
    verified: ClassVar[str] = (
        "`tests/methods/test_new_head.py` and `tests/core/test_heads.py`: the parts of the head and their mixture, "
        "one by one; there is no second implementation of the whole, and no original"
    )

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Search v, then make the head."""
        refinement, used = self.refined(network, target, seed)
        need_head(refinement, self.name)
        return fitted(refinement.blend, refinement.head_tensors(), used | refinement.head_notes)


@dataclass(frozen=True)
class BlendAll(Refining):
    """A blend, its head, and the last layers trained with the blend's statistics held.

    The last layers hold three quarters of the weights; from eight images per class on, all layers are trained. That is
    done once for each third of the support, without it, by SGD with momentum; the mean of these networks, over their
    last steps and over the thirds, is the answer.

    - prior: that of `blend`.
    - epochs, lr: of each training.
    """

    name: ClassVar[str] = "blend-all"
    changes: ClassVar[str] = "everything"
    verified: ClassVar[str] = (
        "`tests/methods/test_blend.py`: without epochs it is the mean of the blends without each fold, to 1e-6; "
        "there is no second implementation of its gradient steps, and no original"
    )

    def fit(self, network: nn.Module | Network, target: Target, seed: int = 0) -> Fitted:
        """Search v, make the head, train the last layers."""
        network = Network.of(network, target.some_images(self.name, "support images"))
        refuse_without_gradients(network)
        refinement, used = self.refined(network, target, seed)
        return fitted(refinement.blend, refinement.tuned_tensors(), used)


def refined(
    network: nn.Module | Network, target: Target, who: str, prior: float, steps: Steps
) -> tuple[Refinement, dict[str, Any]]:
    """The blend to build on, and what became of unlabelled images."""
    first = Refinement(blended(network, target, who, prior), steps)
    if target.unlabelled is None:
        return first, {}
    count = 0 if first.blend.beside is None else len(first.blend.beside)
    mix = first.mix()
    used = {"unlabelled": {"images": count, "classes_shown": mix, "used": bool(count) and mix >= LEAST_MIX}}
    if mix >= LEAST_MIX:
        return first, used
    return Refinement(blended(network, replace(target, unlabelled=None), who, prior), steps), used


def fitted(blend: Blended, tensors: dict[str, Tensor], notes: dict[str, Any]) -> Fitted:
    """The network with the blend, and with other tensors on top of it."""
    changed = merged(blend.network, blend.normals) | tensors
    return Fitted(
        blend.network.with_tensors(changed),
        layers=blend.layer_notes(),
        notes=blend.notes() | notes,
        cautious=blend.bounded and not tensors,
    )


def need_head(refinement: Refinement, who: str) -> None:
    """Raise an error if no new head can be made."""
    if refinement.head is not None:
        return
    network, support = refinement.blend.working, refinement.blend.support
    missing = [label for label in range(network.classes or 0) if label not in support.counts]
    if missing:
        raise FewshiftError(
            f"class {support.class_name(missing[0])} has no support image, so no place in a new head: "
            "add one, or choose the method 'blend'"
        )
    network.need_head(who)
    raise FewshiftError(f"{who} needs a head that gives the network's output: choose the method 'blend'")
