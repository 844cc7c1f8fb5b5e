"""Deltas: small, reversible, safe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fewshift
from fewshift import LCCS, Delta, FewshiftError
from tests.helpers.networks import make_support, make_tiny, same_state, state


@pytest.fixture(scope="module")
def result():
    settings = {"method": LCCS(grid=3, epochs=1), "classes": ["ant", "bee", "cat"], "validate": None}
    return fewshift.adapt(make_tiny(), make_support(), **settings)


def test_apply_gives_the_adapted_network_and_revert_the_source_bit_for_bit(result, tmp_path):
    path = result.delta.save(tmp_path / "d.safetensors")
    adapted = fewshift.apply(make_tiny(), path)
    assert same_state(state(adapted), state(result.model))
    assert not same_state(state(adapted), state(make_tiny()))
    assert same_state(state(fewshift.revert(adapted, path)), state(make_tiny()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_floating_type_is_reversible(dtype):
    source, adapted = make_tiny().to(dtype), make_tiny(seed=3).to(dtype)
    delta = Delta.between(source, adapted)
    assert same_state(state(delta.apply(source)), state(adapted))
    assert same_state(state(delta.revert(adapted)), state(source))


def test_only_tensors_that_differ_are_kept():
    result = fewshift.adapt(
        make_tiny(), make_support(), method=LCCS(grid=3, epochs=1, classifier="source"), validate=None
    )
    assert result.delta.bits.keys() == {"bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias"}


def test_a_resnet18_delta_is_at_most_60_kb(tmp_path):
    model = timm.create_model("resnet18", num_classes=7, zero_init_last=False)
    support = make_support(shots=1, classes=7, size=32)
    result = fewshift.adapt(model, support, method=LCCS(classifier="source", epochs=0, init=0.5), validate=None)
    assert sum(bits.numel() for bits in result.delta.bits.values()) == 2 * 4800
    assert result.delta.save(tmp_path / "d.safetensors").stat().st_size <= 60_000


def test_the_header_tells_what_it_is(result, tmp_path):
    path = result.delta.save(tmp_path / "d.safetensors")
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["fewshift"])
    assert header["method"] == "lccs"
    assert header["classes"] == ["ant", "bee", "cat"]
    assert header["format"] == 2
    assert header["shots"] == 5
    assert header["seed"] == 0
    assert header["version"] == fewshift.__version__
    assert LCCS(**header["settings"]) == LCCS(grid=3, epochs=1)
    assert header["source"].keys() == {"architecture", "weights"}
    assert Delta.load(path).classes == ("ant", "bee", "cat")


def test_a_delta_remembers_the_verdict_and_the_gain(tmp_path):
    result = fewshift.adapt(make_tiny(), make_support(), method="adabn", accept=200)
    delta = Delta.load(result.candidate_delta.save(tmp_path / "d.safetensors"))
    outcome = delta.outcome
    assert (outcome["accepted"], outcome["labelled"], outcome["unlabelled"]) == (False, 15, 0)
    assert outcome["gain"]["point"] == pytest.approx(result.gain.after - result.gain.before, abs=0.02)
    assert delta.facts["verdict"].startswith("rejected")
    assert f"{result.gain.point:+.1f} points" in delta.facts["gain"]
    assert "15 held-out images" in delta.facts["evidence"]


def test_the_same_inputs_give_the_same_bytes(tmp_path):
    files = [
        fewshift.adapt(make_tiny(), make_support(), seed=1).candidate_delta.save(tmp_path / name)
        for name in ("one", "two")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_delta_from_before_outcomes_were_stored_still_loads(result, tmp_path):
    path = replace(result.delta, outcome=None).save(tmp_path / "d.safetensors")
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["fewshift"])
    assert (header["format"], "outcome" in header) == (1, False)  # as those files are
    old = Delta.load(path)
    assert "older fewshift" in old.facts["verdict"]
    assert old.facts["classes"] == "3: ant, bee, cat"
    assert same_state(state(old.apply(make_tiny())), state(result.model))


@pytest.mark.parametrize(
    ("model", "classes", "sentence"),
    [
        (lambda: make_tiny(width=7), None, "other tensors"),
        (lambda: make_tiny(classes=4), None, "other tensors"),
        (lambda: make_tiny(seed=1), None, "same architecture but other weights"),
        (make_tiny, ["bee", "ant", "cat"], "made for classes ant, bee, cat, not for bee, ant, cat"),
    ],
)
def test_the_wrong_network_weights_or_classes_are_refused_and_nothing_changes(result, model, classes, sentence):
    network = model()
    before = state(network)
    with pytest.raises(FewshiftError, match=sentence):
        fewshift.apply(network, result.delta, classes)
    assert same_state(before, state(network))


def test_reverting_something_else_is_refused(result):
    with pytest.raises(FewshiftError, match="other weights than the one this delta was applied to"):
        fewshift.revert(make_tiny(), result.delta)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def cut_header(path):
    path.write_bytes(path.read_bytes()[:20])


def empty(path):
    path.write_bytes(b"")


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


def rename_a_class(path):
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    metadata["fewshift"] = metadata["fewshift"].replace("bee", "dog")
    save_file(load_file(path), path, metadata)


def foreign(path):
    save_file({"x": torch.zeros(3)}, path)


@pytest.mark.parametrize("harm", [truncate, cut_header, empty, flip_a_bit, rename_a_class, foreign])
def test_a_truncated_or_altered_file_is_one_clear_error(result, tmp_path, harm):
    path = result.delta.save(tmp_path / "d.safetensors")
    harm(path)
    with pytest.raises(
        FewshiftError, match=r"d\.safetensors (is not a whole fewshift delta|was altered).*: make it again"
    ):
        fewshift.apply(make_tiny(), path)


def test_a_later_format_asks_for_an_update(result, tmp_path):
    path = result.delta.save(tmp_path / "d.safetensors")
    with safe_open(path, "pt") as file:
        metadata = {"fewshift": json.dumps(json.loads(file.metadata()["fewshift"]) | {"format": 99})}
    save_file(load_file(path), path, metadata)
    with pytest.raises(FewshiftError, match=r"format 99.*update fewshift"):
        Delta.load(path)


def test_a_missing_file_and_an_unwritable_path_are_one_sentence(result, tmp_path):
    with pytest.raises(FewshiftError, match="there is no delta"):
        fewshift.apply(make_tiny(), tmp_path / "none.safetensors")
    with pytest.raises(FewshiftError, match="cannot write"):
        result.delta.save(tmp_path / "no" / "such" / "d.safetensors")


KILLED = """
import signal, sys, time, fewshift.core._files as files
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits deaf ears
with files.whole(sys.argv[1]) as draft:
    draft.write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_kill_while_writing_leaves_the_old_file_whole(tmp_path, how):
    path = tmp_path / "d.safetensors"
    path.write_bytes(b"old")
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with process:
        process.stdout.readline()
        time.sleep(0.1)
        os.kill(process.pid, how)
        process.wait(10)
    assert path.read_bytes() == b"old"
    if how is signal.SIGINT:
        assert [path.name for path in tmp_path.iterdir()] == ["d.safetensors"]
