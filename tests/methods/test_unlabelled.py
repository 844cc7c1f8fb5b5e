"""What SHOT, SFDA and SDDA promise alike: they learn from unlabelled images alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from fewshift import FewshiftError, Network, Target
from fewshift.core.support import Unlabelled
from fewshift.methods.sdda import SDDA
from fewshift.methods.sfda import SFDA
from fewshift.methods.shot import SHOT
from tests.helpers.networks import make_support, make_tiny, same_state, state, unsettle

IMAGES = make_support().images  # 15, of 3 channels and 8x8 pixels
QUICK = {
    "shot": SHOT(epochs=2, batch_size=8),
    "sfda": SFDA(steps=5, memory_every=2, batch_size=8),
    "sdda": SDDA(epochs=2, start_epoch=1, size=8, width=4, noise=6, batch_size=8),
}
LAST_STEP_DIVERGES = [SHOT(epochs=1, lr=1e30), SFDA(steps=1, lr=1e30), replace(QUICK["sdda"], lr=1e30)]
pytestmark = pytest.mark.parametrize("method", QUICK.values(), ids=QUICK)


def target(images=IMAGES, augment=None):
    return Target(unlabelled=Unlabelled(images, augment))


def test_gradients_may_be_switched_off_by_the_caller(method):
    with torch.no_grad():
        off = state(method.adapt(make_tiny(), target()))
    assert same_state(off, state(method.adapt(make_tiny(), target())))


# two images to probe the network; the passes of the method; a last pass for the notes
READS = {
    "shot": 2 + 2 * (15 + 15) + 15,  # each epoch labels and trains
    "sfda": 2 + 15 + 3 * 15 + (8 + 7 + 8 + 7 + 8) + 15,  # the source's labels, three memories, five steps
    "sdda": 2 + 15 + 2 * 15 + 15,  # the range of the values, two epochs
}


def test_a_dataset_is_read_batch_by_batch_and_gives_what_a_tensor_gives(method):
    reads = []

    class Folder(torch.utils.data.Dataset):
        def __len__(self):
            return len(IMAGES)

        def __getitem__(self, index):
            reads.append(index)
            return IMAGES[index], "an ignored label"

    lazy = target(Folder())
    assert not reads
    assert same_state(state(method.adapt(make_tiny(), lazy)), state(method.adapt(make_tiny(), target())))
    assert len(reads) == READS[method.name]


class Odd(nn.Module):
    """A 1x1 convolution as head, frozen BatchNorm, a dictionary as output."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.frozen = FrozenBatchNorm2d(6)
        self.bn = nn.BatchNorm2d(6)
        self.classify = nn.Conv2d(6, 3, 1)

    def forward(self, images):
        hidden = self.bn(self.frozen(self.conv(images)).relu()).mean((2, 3), keepdim=True)
        return {"features": hidden, "logits": self.classify(hidden).flatten(1)}


def test_a_convolutional_head_frozen_batchnorm_and_dictionaries_work(method):
    torch.manual_seed(0)
    model = unsettle(Odd())
    before, after = state(model), state(method.adapt(model, target()))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert not any(name.startswith("frozen.") for name in changed)
    assert changed >= {"conv.weight", "bn.running_var"}
    assert ("classify.weight" in changed) == (method.name != "shot")  # whose head is held


def test_notes_are_plain_numbers(method):
    notes = method.fit(make_tiny(), target()).notes
    assert json.loads(json.dumps(notes)) == notes
    assert sum(notes["predicted"]) == len(IMAGES)


def test_negative_numbers_are_refused_by_name(method):
    for field in ("lr", "batch_size", "momentum", "weight_decay"):
        with pytest.raises(FewshiftError, match=rf"{field}=-1.*{method.name}"):
            replace(method, **{field: -1})
    with pytest.raises(FewshiftError, match=r"batch_size=1.*at least 2"):
        replace(method, batch_size=1)


class Broken(Odd):
    def forward(self, images):
        return super().forward(images.sqrt())  # NaN for negative values


class Dense(Odd):
    def forward(self, images):
        return self.classify(self.conv(images))


@pytest.mark.parametrize(
    ("model", "images", "facts"),
    [
        (make_tiny(), IMAGES[:1], "needs batch statistics, and one unlabelled image has none"),
        (nn.Sequential(make_tiny(), nn.Softmax(1)), IMAGES, "needs a last linear layer"),
        (Dense().eval(), IMAGES, r"one row of two or more logits per image.*\(2, 3, 6, 6\)"),
        (Broken().eval(), IMAGES, "NaN or infinite before adaptation"),
    ],
    ids=["one image", "softmax", "pixels", "nan"],
)
def test_networks_and_images_that_cannot_be_adapted_are_refused(method, model, images, facts):
    with pytest.raises(FewshiftError, match=facts):
        method.adapt(model, target(images))


class Pooled(Odd):
    def forward(self, images):
        return self.classify(self.bn(self.conv(images))).mean((2, 3))


def test_a_head_that_does_not_give_the_networks_output_is_refused(method):
    view = replace(Network.of(Pooled(), IMAGES), head="classify")
    with pytest.raises(FewshiftError, match="'classify' gives 108 values per image and the network 3"):
        method.adapt(view, target())


def test_a_divergence_is_an_error_even_in_the_last_step(method):
    last = next(diverging for diverging in LAST_STEP_DIVERGES if diverging.name == method.name)
    for diverging in (replace(method, lr=1e18), last):
        with pytest.raises(FewshiftError, match=r"NaN|infinite"):
            diverging.adapt(make_tiny(), target())
