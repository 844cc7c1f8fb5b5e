"""Sites: one network for many places. What is expected comes from `fewshift.apply`, one image after the other."""

from __future__ import annotations

import copy
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from safetensors.torch import load_file, save_file
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

import fewshift
from fewshift import Delta, FewshiftError, Sites
from fewshift.core.layout import channels_last, with_layout
from fewshift.core.outputs import main_output
from fewshift.models.cards import Card, with_card
from tests.helpers.networks import Shared, Tiny, make_support, make_tiny, same_state, state, street, unsettle

NORMALISED = ("weight", "bias", "running_mean", "running_var")


@torch.no_grad()
def elsewhere(model: nn.Module, seed: int, everything: bool = False, head: bool = True) -> nn.Module:
    """The network of another place: other BatchNorm tensors and perhaps another head, or all tensors changed."""
    generator, adapted = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    layers = [layer for layer in adapted.modules() if hasattr(layer, "running_mean")]
    last = [layer for layer in adapted.modules() if isinstance(layer, nn.Linear | nn.Conv2d)][-1]
    tensors = [getattr(layer, key) for layer in layers for key in NORMALISED if getattr(layer, key, None) is not None]
    tensors += list(adapted.parameters()) if everything else list(last.parameters()) if head else []
    for tensor in tensors:
        tensor.mul_(1 + 0.1 * torch.rand(tensor.shape, generator=generator).to(tensor))
    return adapted


def write_sites(
    model: nn.Module, folder: Path, small: int = 3, large: int = 0, head: bool = True, **about: object
) -> list[str]:
    folder.mkdir()
    names = [f"camera-{number}" for number in range(small)] + [f"tuned-{number}" for number in range(large)]
    for seed, name in enumerate(names):
        delta = Delta.between(model, elsewhere(model, seed, name.startswith("tuned"), head), **about)
        delta.save(folder / f"{name}.safetensors")
    return names


def one_by_one(model: nn.Module, folder: Path, images: Tensor, of: list[str | None]) -> Tensor:
    networks = {name: fewshift.apply(model, folder / f"{name}.safetensors") for name in {*of} - {None}} | {None: model}
    with torch.no_grad():
        return torch.cat(
            [main_output(networks[name].eval()(image[None])) for image, name in zip(images, of, strict=True)]
        )


def mixed(names: list[str], count: int = 8) -> list[str | None]:
    """Every site at least once, in no order; the source network too."""
    of = [*names, None, *random.Random(0).choices(names, k=count)][:count]
    random.Random(1).shuffle(of)
    return of


def alike(found: Tensor, expected: Tensor) -> bool:
    """To 1e-5 of the largest logit, and not because all logits are the same."""
    scale = float(expected.abs().max())
    return expected.flatten(1).std(0).max() > 1e-3 * scale and bool(((found - expected).abs() <= 1e-5 * scale).all())


def built(make: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return unsettle(make())  # type: ignore[operator]


def pictures(count: int = 8, size: int = 32) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(3))


def unet() -> nn.Module:
    import segmentation_models_pytorch as smp

    return smp.Unet("mobilenet_v2", encoder_weights=None, decoder_channels=(16, 8, 8, 8, 8), classes=3)


class Volumes(nn.Module):
    """BatchNorm over volumes and over vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm3d(4)
        self.flat = nn.BatchNorm1d(4, affine=False)
        self.fc = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.flat(self.bn(self.conv(images[:, None])).relu().mean((2, 3, 4))))


class Frozen(Tiny):
    """BatchNorm whose tensors are all buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.bn2 = FrozenBatchNorm2d(6), FrozenBatchNorm2d(6)


ARCHITECTURES = {
    "tiny": Tiny,
    "BatchNorm twice": Shared,
    "frozen": Frozen,
    "1d and 3d": Volumes,
    "one output": lambda: Tiny(classes=1),
    "timm resnet": lambda: timm.create_model("test_resnet", num_classes=4),
    "timm efficientnet": lambda: timm.create_model("test_efficientnet", num_classes=4),
    "timm densenet": lambda: timm.models.DenseNet(growth_rate=8, block_config=(2, 2), num_classes=4),
    "timm regnet": lambda: timm.create_model("regnetx_002", num_classes=4),
    "torchvision shufflenet": lambda: torchvision.models.shufflenet_v2_x0_5(num_classes=4),
    "street": street,
    "unet": unet,
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_mixed_batch_is_answered_like_one_image_after_the_other(name, tmp_path):
    model, images = built(ARCHITECTURES[name]), pictures()
    names = write_sites(model, tmp_path / "sites", small=3, large=1)
    sites, before = Sites(model, tmp_path / "sites"), state(model)
    small, large = mixed(names[:3]), mixed(names)
    for of in (small, large):
        assert alike(sites(images, of=of), one_by_one(model, tmp_path / "sites", images, of))
    assert sites.one_pass
    assert same_state(state(model), before)


@pytest.mark.parametrize("name", ["tiny", "timm efficientnet", "timm densenet", "1d and 3d", "street"])
def test_channels_last_gives_the_same_answers_in_the_first_pass_and_later(name, tmp_path):
    model, images = built(ARCHITECTURES[name]), pictures()
    of = mixed(write_sites(model, tmp_path / "sites"))
    expected = one_by_one(model, tmp_path / "sites", images, of)
    sites = Sites(with_layout(model, torch.channels_last), tmp_path / "sites")
    for _ in range(3):
        assert alike(sites(channels_last(images), of=of), expected)
    assert alike(sites(images.contiguous(), of=of), expected)
    assert sites.one_pass


class Cut(Tiny):
    """BatchNorm sees a part of larger maps, with gaps in memory, unless the images are small."""

    def forward(self, images: Tensor) -> Tensor:
        maps = self.conv1(images)
        hidden = self.bn1(maps if images.shape[3] <= 16 else maps[:, :, 2:-2, 2:-2]).relu()
        return self.fc((hidden + self.bn2(self.conv2(hidden))).relu().mean((2, 3)))


def test_maps_with_gaps_in_memory_are_answered_whatever_the_pass_before_saw(tmp_path):
    model = with_layout(built(Cut), torch.channels_last)
    of = mixed(write_sites(model, tmp_path / "sites"))
    sites = Sites(model, tmp_path / "sites")
    for size in (16, 16, 32, 16, 32):
        images = channels_last(pictures(size=size))
        assert alike(sites(images, of=of), one_by_one(model, tmp_path / "sites", images, of))
    assert sites.one_pass


def test_a_batch_of_small_deltas_takes_one_pass_and_each_larger_one_its_own(tmp_path, monkeypatch):
    model, images, passes = make_tiny(), pictures(), []
    names = write_sites(model, tmp_path / "sites", small=3, large=2)
    sites = Sites(model, tmp_path / "sites")
    sites(images, of=mixed(names))
    plain = Tiny.forward
    monkeypatch.setattr(Tiny, "forward", lambda self, images: passes.append(len(images)) or plain(self, images))
    sites(images, of=["camera-0", "camera-1", None, "camera-2", "camera-0", "camera-1", None, "camera-0"])
    assert passes == [8]
    passes.clear()
    sites(images, of=["camera-0", "tuned-0", "camera-1", "tuned-1", "tuned-0", "camera-2", "tuned-1", "tuned-1"])
    assert sorted(passes) == [2, 3, 3]


def test_a_site_answers_like_its_adapted_network(tmp_path):
    model, images = make_tiny(), pictures()
    for name in write_sites(model, tmp_path / "sites", small=2, large=1):
        answers = Sites(model, tmp_path / "sites")[name](images)
        expected = fewshift.apply(model, tmp_path / "sites" / f"{name}.safetensors")(images)
        assert torch.equal(answers, expected)
        assert not answers.requires_grad


def test_what_adapt_writes_is_a_site(tmp_path):
    model, images = make_tiny(), pictures(size=8)
    for number, method in enumerate(["lccs", "adabn", "finetune-bn", "finetune-head", "finetune-features", "l2"]):
        result = fewshift.adapt(model, make_support(seed=number), method=method, validate=None)
        result.delta.save(tmp_path / f"{method}.safetensors")
    of = mixed(sorted(file.stem for file in tmp_path.iterdir()))
    sites = Sites(model, tmp_path)
    assert alike(sites(images, of=of), one_by_one(model, tmp_path, images, of))
    assert sites.one_pass


def test_an_answer_does_not_depend_on_its_batch_mates(tmp_path):
    model, images = built(ARCHITECTURES["timm efficientnet"]), pictures()
    of = mixed(write_sites(model, tmp_path / "sites", large=1))
    sites = Sites(model, tmp_path / "sites")
    together = sites(images, of=of)
    others = sites(torch.cat([images[:1], 50 * images[1:]]), of=[of[0], *reversed(of[1:])])
    assert torch.allclose(together[0], others[0], atol=1e-5)
    assert torch.allclose(together[:1], sites(images[:1], of=of[:1]), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_floating_type_works_and_images_follow_the_network(dtype, tmp_path):
    model, images = make_tiny().to(dtype), pictures(size=8)
    of = mixed(write_sites(model, tmp_path / "sites", large=1))
    sites = Sites(model, tmp_path / "sites")
    answers, expected = sites(images, of=of), one_by_one(model, tmp_path / "sites", images.to(dtype), of)
    assert answers.dtype == dtype
    assert torch.allclose(answers, expected, atol=0 if dtype == torch.float64 else 0.02, rtol=1e-12)
    assert sites.one_pass


def test_channels_without_weight_are_exact(tmp_path):
    model = make_tiny()
    with torch.no_grad():
        model.bn1.weight[:3] = 0
        model.bn2.weight[3:] = 0
    other = elsewhere(model, 0)
    with torch.no_grad():
        other.bn1.weight[:2] = 1
    Delta.between(model, other).save(tmp_path / "a.safetensors")
    of = ["a", None, "a", None]
    for images in (pictures(4), channels_last(pictures(4))):
        sites = Sites(model, tmp_path)
        sites(images, of=of)
        assert alike(sites(images, of=of), one_by_one(model, tmp_path, images, of))


def test_an_image_of_nan_spoils_its_own_answer_alone(tmp_path):
    model, images = make_tiny(), pictures()
    of = mixed(write_sites(model, tmp_path / "sites"))
    images[2] = torch.nan
    sites = Sites(model, tmp_path / "sites")
    answers = sites(images, of=of)
    assert sites.one_pass
    assert torch.allclose(answers, one_by_one(model, tmp_path / "sites", images, of), atol=1e-5, equal_nan=True)
    assert answers.isnan().any(1).nonzero().tolist() == [[2]]


def test_no_images_give_no_answers(tmp_path):
    write_sites(make_tiny(), tmp_path / "sites")
    sites = Sites(make_tiny(), tmp_path / "sites")
    assert sites(pictures()[:0], of=[]).shape == sites["camera-0"](pictures()[:0]).shape == (0, 3)


# --- networks that do not allow one pass


class Folded(Tiny):
    """Each image is seen as four quarters, which BatchNorm takes for four images."""

    def forward(self, images: Tensor) -> Tensor:
        quarters = torch.cat([half for whole in images.chunk(2, 2) for half in whole.chunk(2, 3)])
        return super().forward(quarters).view(4, len(images), -1).mean(0)


class Around(Tiny):
    """A tensor of a BatchNorm layer is used without calling it, too."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images * (1 + self.bn1.bias.abs().mean()))


class Turned(Tiny):
    """The batch is turned around within."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flip(0)).flip(0)


class Halved(Tiny):
    """A fused activation that looks across channels."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1 = BatchNormAct2d(6, act_layer=lambda **_: nn.GLU(1))
        self.conv2 = nn.Conv2d(3, 3, 3, padding=1)
        self.bn2 = BatchNormAct2d(3, act_layer=lambda **_: nn.PReLU(3))
        self.fc = nn.Linear(3, 3)


@pytest.mark.parametrize("kind", [Folded, Around, Turned, Halved])
def test_networks_that_mix_images_or_channels_are_answered_site_by_site(kind, tmp_path):
    model, images = built(kind), pictures()
    of = mixed(write_sites(model, tmp_path / "sites", head=False))
    sites = Sites(model, tmp_path / "sites")
    for _ in range(2):
        assert alike(sites(images, of=of), one_by_one(model, tmp_path / "sites", images, of))
    assert sites.one_pass is False
    assert "one pass for each site" in repr(sites)


class Doubled(Tiny):
    """Something follows the head."""

    def forward(self, images: Tensor) -> Tensor:
        return 2 * super().forward(images)


def test_a_head_that_is_not_found_can_be_named(tmp_path):
    model, images = built(Doubled), pictures()
    of = mixed(write_sites(model, tmp_path / "sites"))
    expected = one_by_one(model, tmp_path / "sites", images, of)
    for head in (None, "fc"):
        sites = Sites(model, tmp_path / "sites", head=head)
        assert alike(sites(images, of=of), expected)
        assert sites.one_pass is (None if head is None else True)
    with pytest.raises(FewshiftError, match="head 'nowhere' is not a linear layer"):
        Sites(model, tmp_path / "sites", head="nowhere")


class Patched(Tiny):
    """Large images are cut into two."""

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[3] <= 16:
            return super().forward(images)
        return super().forward(torch.cat(images.chunk(2, 3))).view(2, len(images), -1).mean(0)


def test_a_network_that_folds_only_some_images_is_noticed_when_it_does(tmp_path):
    model = built(Patched)
    of = mixed(write_sites(model, tmp_path / "sites"))
    sites = Sites(model, tmp_path / "sites")
    sites(pictures(size=16), of=of)
    assert sites.one_pass
    images = pictures(size=32)
    assert alike(sites(images, of=of), one_by_one(model, tmp_path / "sites", images, of))


# --- memory and the folder


def test_beside_the_network_there_is_only_what_the_deltas_change(tmp_path):
    model = built(ARCHITECTURES["timm resnet"])
    names = write_sites(model, tmp_path / "sites", small=4)
    sites = Sites(model, tmp_path / "sites")
    assert sites.nbytes == 0
    sites(pictures(4), of=names)
    stored = [load_file(file) for file in (tmp_path / "sites").iterdir()]
    assert sites.nbytes == sum(tensor.nbytes for tensors in stored for tensor in tensors.values())
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in sites._model.parameters()} == own


def test_of_large_deltas_no_more_than_the_network_is_kept(tmp_path):
    model = make_tiny()
    names = write_sites(model, tmp_path / "sites", small=0, large=4)
    sites = Sites(model, tmp_path / "sites")
    network = sum(tensor.nbytes for tensor in model.state_dict().values())
    images = pictures()
    for name in [*names, names[0]]:
        assert alike(sites[name](images), one_by_one(model, tmp_path / "sites", images, [name] * 8))
        assert 0 < sites.nbytes <= network


def test_names_are_those_of_the_files(tmp_path):
    write_sites(make_tiny(), tmp_path / "sites")
    (tmp_path / "sites" / "notes.txt").write_text("not a site")
    (tmp_path / "sites" / ".hidden.safetensors").write_bytes(b"")
    sites = Sites(make_tiny(), tmp_path / "sites")
    assert (len(sites), list(sites)) == (3, ["camera-0", "camera-1", "camera-2"])
    assert "camera-1" in sites
    assert "camera-7" not in sites
    assert "3: camera-0, camera-1, camera-2" in repr(sites)
    assert sites["camera-1"].file == tmp_path / "sites" / "camera-1.safetensors"


def test_the_folder_is_read_again_on_demand(tmp_path):
    model, images, folder = make_tiny(), pictures(2, 8), tmp_path / "sites"
    write_sites(model, folder, small=2)
    sites = Sites(model, folder)
    before = sites["camera-0"](images)
    (folder / "camera-1.safetensors").replace(folder / "camera-0.safetensors")
    Delta.between(model, elsewhere(model, 9)).save(folder / "new.safetensors")
    assert torch.equal(sites["camera-0"](images), before)
    assert "new" not in sites
    sites.reload()
    assert list(sites) == ["camera-0", "new"]
    assert not torch.equal(sites["camera-0"](images), before)


def test_threads_may_share_the_sites(tmp_path):
    model = make_tiny()
    names = write_sites(model, tmp_path / "sites", large=1)
    sites = Sites(model, tmp_path / "sites")
    jobs = [random.Random(seed).choices([*names, None], k=6) for seed in range(12)]
    expected = [one_by_one(model, tmp_path / "sites", pictures(6), of) for of in jobs]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda of: sites(pictures(6), of=of), jobs))
    assert all(torch.allclose(found, wanted, atol=1e-5) for found, wanted in zip(answers, expected, strict=True))


# --- bad input


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sites(make_tiny(), tmp_path / "sites", classes=("ant", "bee", "cat"))
    return tmp_path / "sites"


@pytest.mark.parametrize(
    ("of", "sentence"),
    [
        (["camera-0", "camra-1"], "no site 'camra-1' in .*: did you mean 'camera-1'"),
        (["camera-0", "x"], "no site 'x' in .*: it has camera-0, camera-1, camera-2$"),
        (["camera-0"], "there are 2 images and 1 sites: name one for each image"),
        (["camera-0", 7], "the name of a site is of type int"),
        ("camera-0", "of='camera-0' is one word: give a list"),
        (7, "of is of type int: give a list"),
    ],
)
def test_a_wrong_word_is_one_sentence(folder, of, sentence):
    with pytest.raises(FewshiftError, match=sentence):
        Sites(make_tiny(), folder)(pictures(2), of=of)


def test_wrong_images_are_one_sentence(folder):
    sites = Sites(make_tiny(), folder)
    with pytest.raises(FewshiftError, match="images are of type list: give a tensor"):
        sites["camera-0"]([1, 2])
    with pytest.raises(FewshiftError, match="images are uint8: preprocess them to floating point first"):
        sites(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), of=["camera-0", "camera-1"])
    with pytest.raises(FewshiftError, match=r"images have shape \(\): give a batch"):
        sites["camera-0"](torch.tensor(1.0))
    for of in (["camera-0"] * 2, ["camera-0", "camera-1"]):
        with pytest.raises(
            FewshiftError, match=r"cannot run on images of shape \(2, 5, 8, 8\) .*: check size, channels"
        ):
            sites(torch.zeros(2, 5, 8, 8), of=of)


def test_files_that_do_not_fit_are_refused_by_name_and_the_others_work(folder):
    model, images = make_tiny(), pictures(2)
    Delta.between(make_tiny(seed=5), elsewhere(make_tiny(seed=5), 0)).save(folder / "weights.safetensors")
    Delta.between(make_tiny(4), elsewhere(make_tiny(4), 0)).save(folder / "shape.safetensors")
    Delta.between(model, elsewhere(model, 0), classes=("bee", "ant", "cat")).save(folder / "order.safetensors")
    save_file(model.state_dict(), folder / "network.safetensors")
    content = bytearray((folder / "camera-2.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "altered.safetensors").write_bytes(content)
    sites = Sites(model, folder, classes=["ant", "bee", "cat"])
    sentences = {
        "weights": "other weights than the one",
        "shape": "other tensors than the one",
        "order": "made for classes bee, ant, cat, not for ant, bee, cat",
        "network": "is not a whole fewshift delta",
        "altered": "was altered after it was written",
    }
    for name, sentence in sentences.items():
        with pytest.raises(FewshiftError, match=f"^site '{name}': .*{sentence}"):
            sites[name](images)
        with pytest.raises(FewshiftError, match=f"^site '{name}': "):
            sites(images, of=["camera-0", name])
    of = ["camera-0", "camera-1"]
    assert alike(sites(images, of=of), one_by_one(model, folder, images, of))
    with pytest.raises(FewshiftError, match="site 'order'"):
        Sites(with_card(make_tiny(), Card(classes=("ant", "bee", "cat"))), folder)["order"](images)


def test_sites_with_other_classes_are_not_mixed(folder):
    model, images = make_tiny(), pictures(2)
    Delta.between(model, elsewhere(model, 0), classes=("bee", "ant", "cat")).save(folder / "order.safetensors")
    sites = Sites(model, folder)
    assert sites["order"](images).shape == (2, 3)
    with pytest.raises(FewshiftError, match="'camera-0' has classes ant, bee, cat and site 'order' has bee, ant, cat"):
        sites(images, of=["camera-0", "order"])


def test_a_folder_without_deltas_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FewshiftError, match=r"no delta \(\*.safetensors\) in .*: write some"):
        Sites(make_tiny(), tmp_path)
    with pytest.raises(FewshiftError, match="nowhere does not exist: give a folder"):
        Sites(make_tiny(), tmp_path / "nowhere")
    with pytest.raises(FewshiftError, match="file is a file: give a folder"):
        Sites(make_tiny(), tmp_path / "file")


def test_a_network_whose_batchnorm_keeps_no_statistics_is_refused(folder):
    model = make_tiny()
    model.bn1 = nn.BatchNorm2d(6, track_running_stats=False)
    with pytest.raises(FewshiftError, match="'bn1' keeps no running statistics"):
        Sites(model, folder)


def test_a_network_that_is_trained_on_is_noticed_and_one_that_is_moved_does_no_harm(folder):
    model, images, of = make_tiny(), pictures(2), ["camera-0", "camera-1"]
    sites = Sites(model, folder)
    expected = sites(images, of=of)
    model.double().train()
    assert torch.equal(sites(images, of=of), expected)
    model = make_tiny()
    sites = Sites(model, folder)
    with torch.no_grad():
        model.conv1.weight.mul_(2)
    with pytest.raises(FewshiftError, match="was changed after its sites were opened"):
        sites(images, of=of)
