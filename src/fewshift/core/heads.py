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
from fewshift.errors import DivergedError, FewshiftError

SCALES = torch.logspace(-2, 3, 101, dtype=torch.float64)
MOST_STEPS = 60  # of L-BFGS


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


def leaning_rows(points: Tensor, labels: Tensor, source: Tensor, pull: float, more: Tensor | float = 0.0) -> Tensor:
    """(classes, features), of length 1: each class's mean direction, drawn towards the source's row for that class.

    c_y = normalise(h m_y + pull w_y / |w_y|), where m_y is the mean of the class's features, scaled to length 1, and h
    the harmonic mean of how many images the classes have. So few images leave the source's rows almost as they are,
    many replace them, and no class gains from having more images than another. `more` (classes, features) is what
    other images add to the sum.
    """
    sums, counts = _class_sums(F.normalize(points, dim=1), labels, len(source))
    means = sums / counts.clamp(min=1).unsqueeze(1)
    return F.normalize(_harmonic(counts) * means + pull * F.normalize(source.to(points), dim=1) + more, dim=1)


def scores_apart(points: Tensor, labels: Tensor, source: Tensor, pull: float) -> Tensor:
    """(N, classes): cosines of every image with the leaning rows that were made without it."""
    units, towards = F.normalize(points, dim=1), pull * F.normalize(source.to(points), dim=1)
    sums, counts = _class_sums(units, labels, len(source))
    cosines = units.new_empty(len(units), len(source))
    for label in labels.unique().tolist():  # without an image of this class the rows of all others are the same
        mine = labels == label
        left = counts.clone()
        left[label] -= 1
        others = F.normalize(_harmonic(left) * sums / left.clamp(min=1).unsqueeze(1) + towards, dim=1)
        own = (sums[label] - units[mine]) / left[label].clamp(min=1)
        cosines[mine] = units[mine] @ others.T
        cosines[mine, label] = (units[mine] * F.normalize(_harmonic(left) * own + towards[label], dim=1)).sum(1)
    return cosines


def _class_sums(units: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """(classes, features) and (classes,): the sum of each class's rows, and how many there are."""
    members = F.one_hot(labels, classes).to(units).T
    return members @ units, members.sum(1)


def _harmonic(counts: Tensor) -> float:
    """The harmonic mean of those counts that are not zero; 0 if all are."""
    some = counts[counts > 0]
    return float(len(some) / (1 / some).sum()) if len(some) else 0.0


def best_scale(cosines: Tensor, labels: Tensor) -> float:
    """The factor under which these cosines have the least cross-entropy; one more image counts as wrong."""
    doubt = 1 / (len(labels) + 1)
    losses = torch.stack([F.cross_entropy(scale * cosines, labels, label_smoothing=doubt) for scale in SCALES])
    return float(SCALES[losses.argmin()])


def trained_rows(points: Tensor, labels: Tensor, rows: Tensor, decay: float, bias: Tensor | None = None) -> Tensor:
    """The rows that minimise the cross-entropy of these points + decay / 2 |rows - start|^2; the bias is held.

    Every class counts the same, however many images it has. Classes without images are left out of the competition,
    so that they are not pushed away: nothing speaks against them.
    """
    seen, places = labels.unique(return_inverse=True)
    counts = places.bincount().to(points)
    weight = 1 / (len(seen) * counts)
    start, held = rows[seen], 0.0 if bias is None else bias[seen]
    move = torch.zeros_like(start, requires_grad=True)
    optimizer = torch.optim.LBFGS([move], max_iter=MOST_STEPS, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        losses = F.cross_entropy(points @ (start + move).T + held, places, reduction="none")
        value: Tensor = (weight[places] * losses).sum() + decay / 2 * move.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(objective)
    trained = rows.clone()
    trained[seen] += move.detach()
    return trained


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

    losses = fit(cost, batches, optimizer, epochs, what="classifier").losses
    with torch.no_grad():
        last = cost(torch.arange(1))
    if not torch.isfinite(last):
        raise DivergedError("training the classifier diverged, its loss is NaN or infinite: lower lr")
    return losses


@torch.no_grad()
def gives_output(model: nn.Module, head: str, images: Tensor) -> bool:
    """Whether the head's output is the network's output, with nothing after it."""
    with head_inputs(model, head) as seen:
        output = logits_of(model(like(model, images[:2])))
    direct = linear(model, head).forward(seen[-1])
    if direct.numel() != output.numel():
        return False
    return torch.allclose(direct.reshape(output.shape), output.to(direct.dtype), atol=1e-4)


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
    return best_scale(cosines / length, labels) / length
