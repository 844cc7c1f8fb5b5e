"""The classifier on top: nearest centroids as a linear layer, and training a linear layer on features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from fewshift.core.loop import Batches, fit
from fewshift.core.losses import Loss
from fewshift.core.network import Network, features, head_inputs, like, linear, logits_of
from fewshift.core.support import Support
from fewshift.errors import FewshiftError

SCALES = torch.logspace(-2, 3, 101, dtype=torch.float64)


def centroids(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(classes, features): the mean of the raw features of each class; zero rows for classes without images."""
    members = F.one_hot(labels, classes).to(features).T
    return (members @ features) / members.sum(1, keepdim=True).clamp(min=1)


def nearest_centroid_head(network: Network, model: nn.Module, support: Support) -> dict[str, Tensor]:
    """The head's tensors with which `model`, a working copy, classifies by nearest centroid.

    argmax_k cos(f, c_k) is the argmax of a linear layer with rows c_k / |c_k| and no bias, since all classes share the
    length of f. One factor for all rows makes the softmax probabilities usable and cannot change a prediction.
    """
    head = network.need_head("nearest-centroid classification")
    module = linear(model, head)
    weight = module.weight
    points = features(model, head, like(model, support.pictures)).flatten(1).double()
    if network.classes != weight.shape[0]:
        raise FewshiftError(f"head '{head}' does not give the network's {network.classes} outputs: pass another head")
    missing = [label for label in range(len(weight)) if label not in support.counts]
    if missing:
        raise FewshiftError(
            f"class {support.class_name(missing[0])} has no support image, so no centroid: "
            "add one, or keep the source's head (for LCCS classifier='source')"
        )
    rows = F.normalize(centroids(points, support.targets, len(weight)), dim=1)
    tensors = {f"{head}.weight": (rows * _scale(points, support.targets, len(weight))).reshape(weight.shape)}
    if module.bias is not None:
        tensors[f"{head}.bias"] = torch.zeros_like(module.bias)
    return tensors


def train_head(
    model: nn.Module, head: str, support: Support, loss: Loss, batches: Batches, optimizer: Optimizer, epochs: int
) -> list[float]:
    """Train the head of a working copy, in place, and hold its body.

    Without augmentation, and if nothing follows the head, the body runs only once.
    """
    layer = linear(model, head)
    together = isinstance(support.images, Tensor) and support.augment is None
    if together and gives_output(model, head, support.pictures):
        inputs = features(model, head, like(model, support.pictures))

        def cost(indices: Tensor) -> Tensor:
            return loss(support.kind.logits(layer.forward(inputs[indices])), support.targets[indices])
    else:

        def cost(indices: Tensor) -> Tensor:
            images, labels = support.batch(indices)
            return loss(logits_of(model(like(model, images))), labels)

    return fit(cost, batches, optimizer, epochs, what="classifier").losses


@torch.no_grad()
def gives_output(model: nn.Module, head: str, images: Tensor) -> bool:
    """Whether the head's output is the network's output, with nothing after it."""
    with head_inputs(model, head) as seen:
        output = logits_of(model(like(model, images[:2])))
    direct = linear(model, head).forward(seen[-1])
    return direct.numel() == output.numel() and torch.allclose(direct.reshape(output.shape), output, atol=1e-4)


def _scale(features: Tensor, labels: Tensor, classes: int) -> float:
    """The factor under which leave-one-out predictions of the support have the least cross-entropy.

    One more image counts as wrong: if all were right, the factor would have no bound. If a class has a single image,
    none can be left out, and the factor gives a margin of ten between parallel and orthogonal features.
    """
    length = float(features.norm(dim=1).mean().clamp(min=1e-12))
    counts = labels.bincount(minlength=classes)
    if counts[labels].min() < 2:
        return 10 / length
    sums = centroids(features, labels, classes) * counts.unsqueeze(1)
    own = (sums[labels] - features) / (counts[labels] - 1).unsqueeze(1)
    cosines = features @ F.normalize(sums, dim=1).T
    cosines.scatter_(1, labels.unsqueeze(1), (features * F.normalize(own, dim=1)).sum(1, keepdim=True))
    doubt = 1 / (len(labels) + 1)
    losses = torch.stack([F.cross_entropy(s / length * cosines, labels, label_smoothing=doubt) for s in SCALES])
    return float(SCALES[losses.argmin()]) / length
