"""A killed ``ratp watch`` loses no image and answers none twice; a killed ``ratp serve`` keeps the last version."""

from __future__ import annotations

import http.client
import json
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from helpers import journal_of, same_tensors
from own_images import encode
from ratp._core.files import read_tensors
from ratp.deploy.deployment import Deployment
from ratp.training.method import unpack
from tiny_deployment import DARK, KNOWN, NEGATIVE, copy_of, make_deployment, put

KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    return make_deployment(tmp_path_factory.mktemp("deployed"))


@pytest.fixture(scope="module")
def inbox(tmp_path_factory):
    """Images that the model knows, some that the guard refuses to adapt to, and some that it accepts."""
    folder = tmp_path_factory.mktemp("in")
    for day, (name, images) in enumerate({"a": KNOWN[:128], "b": NEGATIVE[:64], "c": DARK[:100]}.items()):
        put(folder, name, images, 1e9 * (day + 1))
    return folder


def command(inbox, model):
    return ["watch", inbox, "-d", model, "--once", "--adapt", "auto", "--device", "cpu", "--latency", "0"]


@pytest.fixture(scope="module")
def straight(warm, deployed, inbox, tmp_path_factory):
    """The deployment after all images, without interruption, and the number of points there were."""
    folder = tmp_path_factory.mktemp("straight")
    model = copy_of(deployed, folder / "model")
    ended = warm.run(*command(inbox, model), within=model, tally=folder / "points")
    assert ended.code == 0, ended
    assert [event["event"] for event in journal_of(model) if event["event"] in ("refused", "version")] == [
        *("version", "refused", "version")
    ]
    return model, (folder / "points").stat().st_size


def answers(model):
    rows = [json.loads(line) for line in (model / "predictions.jsonl").read_text().splitlines()]
    return [(row["file"], row["class"], row["version"]) for row in rows]


def assert_same(model, other):
    assert answers(model) == answers(other)
    assert len(answers(model)) == 292
    states = [read_tensors(folder / "versions" / "2.safetensors")[0] for folder in (model, other)]
    assert same_tensors(*states)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_points(warm, deployed, inbox, straight, kills, tmp_path):
    undisturbed, points = straight
    model, chance = copy_of(deployed, tmp_path / "model"), random.Random(kills)
    for _ in range(kills):
        ended = warm.run(*command(inbox, model), within=model, at=chance.randint(3, max(points // kills, 12)))
        assert ended.code == KILLED, ended
    ended = warm.run(*command(inbox, model))
    assert ended.code == 0, ended
    assert_same(model, undisturbed)


@pytest.mark.slow
def test_killed_at_each_point(warm, deployed, inbox, straight, tmp_path):
    undisturbed, points = straight
    for at in range(2, points, 5):
        model = copy_of(deployed, tmp_path / str(at))
        warm.run(*command(inbox, model), within=model, at=at)
        ended = warm.run(*command(inbox, model))
        assert ended.code == 0, ended
        assert_same(model, undisturbed)


@pytest.mark.slow
def test_killed_at_moments(warm, deployed, inbox, straight, tmp_path):
    chance, kills, ends = random.Random(3), 0, 0
    model = copy_of(deployed, tmp_path / "0")
    while kills < 20:
        process = warm.start(*command(inbox, model))
        time.sleep(chance.uniform(0.5, 2.5))
        process.kill(signal.SIGKILL)
        if process.wait().code == KILLED:
            kills += 1
            continue
        assert_same(model, straight[0])
        ends += 1
        model = copy_of(deployed, tmp_path / str(ends))
    assert warm.run(*command(inbox, model)).code == 0
    assert_same(model, straight[0])


@pytest.mark.slow
def test_full_disk(warm, deployed, inbox, straight, tmp_path):
    model = copy_of(deployed, tmp_path / "model")
    for at in (6, 9, 12):
        ended = warm.run(*command(inbox, model), "--quiet", within=model, at=at, then="ENOSPC")
        assert ended.code == 2 and "No space left on device" in ended.err, ended
    assert warm.run(*command(inbox, model)).code == 0
    assert_same(model, straight[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_it_cleanly(warm, deployed, inbox, number, tmp_path):
    model = copy_of(deployed, tmp_path / "model")
    process = warm.start("watch", inbox, "-d", model, "--adapt", "never", "--device", "cpu")
    while not (model / "predictions.jsonl").exists():
        time.sleep(0.05)
    time.sleep(0.5)
    process.kill(number)
    ended = process.wait()
    assert ended.code == 128 + number
    assert "The same command continues" in ended.err and "Traceback" not in ended.err


def port_of(process):
    """Waits until a server says where it listens."""
    place, said = Path(process.place["err"]), ""
    while "/predict" not in said:
        time.sleep(0.02)
        said = place.read_text() if place.exists() else ""
    return int(said.partition("http://127.0.0.1:")[2].partition(";")[0])


@pytest.mark.slow
def test_killed_server_comes_back_as_an_accepted_version(warm, deployed, tmp_path):
    straight = copy_of(deployed, tmp_path / "straight")
    with Deployment(straight, device="cpu") as model:
        expected = {1: model.predict(KNOWN[:32])}
        model.observe(DARK[:128])
        assert model.adapt().accepted
        expected[2] = model.predict(KNOWN[:32])
    chance, seen = random.Random(5), set()
    for number in range(20):
        folder = copy_of(deployed, tmp_path / str(number))
        process = warm.start("serve", folder, "--port", 0, "--device", "cpu", env={"RATP_TOKEN": "secret"})
        client = http.client.HTTPConnection("127.0.0.1", port_of(process), timeout=20)
        files = [encode(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in DARK[:128]]
        for file in files:
            client.request("POST", "/observe", file, {"Content-Type": "image/png"})
            assert client.getresponse().read()
        client.request("POST", "/adapt", headers={"Authorization": "Bearer secret"})
        assert client.getresponse().status == 202
        client.close()
        time.sleep(chance.uniform(0.0, 1.0))
        process.kill(signal.SIGKILL)
        assert process.wait().code == KILLED
        with Deployment(folder, device="cpu") as model:
            seen.add(model.version)
            assert torch.equal(model.predict(KNOWN[:32]), expected[model.version])
    assert seen == {1, 2}


def assert_whole(model):
    """The version that answers is the one on disk, bit for bit, and no image is answered twice."""
    with Deployment(model, device="cpu") as opened:
        opened.settings = replace(opened.settings, adapt="never")  # so that closing saves nothing
        number, found = opened.version, opened._model.method.state()
    stored = unpack(read_tensors(model / "versions" / f"{number}.safetensors")[0])["state"]
    assert same_tensors(stored, found)
    files = [row[0] for row in answers(model)] if (model / "predictions.jsonl").exists() else []
    assert len(files) == len(set(files))


@pytest.fixture(scope="module")
def adapting(tmp_path_factory):
    return make_deployment(tmp_path_factory.mktemp("adapting"), "tent", "online")


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_while_adapting_online(warm, adapting, inbox, kills, tmp_path):
    model, chance = copy_of(adapting, tmp_path / "model"), random.Random(kills)
    words = ["watch", inbox, "-d", model, "--once", "--device", "cpu", "--latency", "0"]
    for _ in range(kills):
        ended = warm.run(*words, within=model, at=chance.randint(3, 25))
        assert ended.code in (KILLED, 0), ended
        if ended.code == KILLED and (model / "predictions.jsonl").exists():
            part = (model / "predictions.jsonl").read_bytes()
            (model / "predictions.jsonl").write_bytes(part[: part.rfind(b"\n") + 1])  # as the next watch cuts it
        assert_whole(model)
    ended = warm.run(*words)
    assert ended.code == 0, ended
    assert_whole(model)
    assert len(answers(model)) == 292


@pytest.mark.slow
def test_killed_at_each_point_of_adapting_online(warm, adapting, inbox, tmp_path):
    words = ["watch", inbox, "--once", "--device", "cpu", "--latency", "0", "-d"]
    whole = copy_of(adapting, tmp_path / "straight")
    assert warm.run(*words, whole, within=whole, tally=tmp_path / "points").code == 0
    for at in range(2, (tmp_path / "points").stat().st_size, 3):
        model = copy_of(adapting, tmp_path / str(at))
        warm.run(*words, model, within=model, at=at)
        ended = warm.run(*words, model)
        assert ended.code == 0, ended
        assert_whole(model)
        assert len(answers(model)) == 292


@pytest.mark.slow
def test_killed_before_it_knows_what_is_usual(warm, inbox, tmp_path):
    deployed = make_deployment(tmp_path, bare=True)
    words = ["watch", inbox, "--once", "--device", "cpu", "--latency", "0", "--adapt", "never", "-d"]
    whole = copy_of(deployed, tmp_path / "straight")
    assert warm.run(*words, whole, within=whole, tally=tmp_path / "points").code == 0
    expected = read_tensors(whole / "versions" / "2.safetensors")[0]
    for at in range(2, (tmp_path / "points").stat().st_size, 2):
        model = copy_of(deployed, tmp_path / str(at))
        warm.run(*words, model, within=model, at=at)
        ended = warm.run(*words, model)
        assert ended.code == 0, ended
        assert_whole(model)
        assert [name for name, *_ in answers(model)] == [name for name, *_ in answers(whole)]
        assert same_tensors(read_tensors(model / "versions" / "2.safetensors")[0], expected)


@pytest.mark.slow
def test_killed_server_that_adapts_online_comes_back_as_a_saved_version(warm, adapting, tmp_path):
    chance, seen = random.Random(7), set()
    files = [encode(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in DARK[:200]]
    for number in range(20):
        folder = copy_of(adapting, tmp_path / str(number))
        process = warm.start("serve", folder, "--port", 0, "--device", "cpu")
        client, sent = http.client.HTTPConnection("127.0.0.1", port_of(process), timeout=20), chance.randint(60, 200)
        for file in files[:sent]:
            client.request("POST", "/observe", file, {"Content-Type": "image/png"})
            assert client.getresponse().read()
        client.close()
        process.kill(signal.SIGKILL)
        assert process.wait().code == KILLED
        assert_whole(folder)
        with Deployment(folder, device="cpu") as model:
            assert model.version == 1 + sent // 64
            seen.add(model.version)
    assert len(seen) > 1
