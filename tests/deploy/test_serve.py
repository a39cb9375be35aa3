"""``ratp serve``: right answers to many clients, and clear ones to bad requests; the model keeps answering."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import sys
import threading
import zlib
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import journal_of, ratp
from own_images import encode
from ratp.deploy import serve
from ratp.deploy.deployment import Deployment
from ratp.deploy.model import Model
from ratp.deploy.serve import Limits, application, server_for
from ratp.deploy.store import Store
from ratp.errors import RunDirectoryError
from tiny_deployment import DARK, KNOWN, NEGATIVE, copy_of, make_deployment

TYPE = {"Content-Type": "image/png"}
TOKEN = {"Authorization": "Bearer secret"}
FILES = [encode(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in KNOWN[:64]]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    return make_deployment(tmp_path_factory.mktemp("deployed"))


@pytest.fixture
def model(deployed, tmp_path):
    with Deployment(copy_of(deployed, tmp_path / "model"), device="cpu") as model:
        yield model


@contextmanager
def running(model, token="secret", **limits):
    """Serves a deployment in a thread; yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = server_for(application(model, Limits(**limits), token))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def port(model):
    with running(model) as number:
        yield number


def ask(port, path, body=None, headers=None, method=None):
    """Status, headers and JSON or text of an answer."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    client.request(method or ("GET" if body is None else "POST"), path, body, headers or {})
    answer = client.getresponse()
    text = answer.read().decode()
    client.close()
    is_json = "json" in answer.headers.get("Content-Type", "")
    return answer.status, dict(answer.headers), json.loads(text) if is_json else text


def post(port, path, body=b"", headers=TYPE):
    status, _, found = ask(port, path, body, headers, "POST")
    return status, found


def observe(port, images):
    for k, image in enumerate(images):
        file = encode(Image.fromarray(image.permute(1, 2, 0).numpy()))
        assert post(port, f"/observe?name=image-{k}", file)[0] == 200


def huge_png(side):
    """A small file that claims to be a huge image."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    parts = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_eight_clients_get_the_answers_to_their_own_images(model, port):
    expected = model.answer(KNOWN[:64])
    found = {}

    def work(first):
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        for k in range(first, 64, 8):
            client.request("POST", "/predict", FILES[k], TYPE)
            found[k] = json.loads(client.getresponse().read())
        client.close()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(64):
        assert found[k]["class"] == expected.labels[k]
        assert found[k]["confidence"] == pytest.approx(expected.confidence[k], abs=1e-4)
        assert (found[k]["version"], found[k]["level"]) == (1, "fine")
    assert not journal_of(model.folder, "window")  # nothing is remembered of /predict
    assert "ratp_images_total 64\n" in ask(port, "/metrics")[2]


def test_alarm_adaptation_and_rollback(model, port):
    observe(port, [*KNOWN[:64], *DARK[:128]])
    status, _, state = ask(port, "/versions")
    assert (status, state["current"], state["level"], state["waiting"]) == (200, 1, "drifted", 128)
    assert 'ratp_alarm{level="drifted"} 1\n' in ask(port, "/metrics")[2]
    assert post(port, "/adapt", headers=TOKEN) == (202, {"adapting": True, "images": 128})
    assert model.wait().accepted
    assert post(port, "/predict", FILES[0])[1]["version"] == 2
    page = ask(port, "/")[2]
    assert "version 2: adapted to domain-2" in page and "stage on domain-2 began, with 88 images" in page
    assert "<polyline" in page and "<script" not in page
    status, found = post(port, "/rollback", headers=TOKEN)
    assert (status, found["number"]) == (200, 1)
    assert ask(port, "/healthz")[2]["version"] == 1
    status, found = post(port, "/rollback?version=7", headers=TOKEN)
    assert status == 409 and "there is no version 7. Valid: 1, 2" in found["error"]
    assert post(port, "/rollback", headers=TOKEN)[0] == 409
    assert post(port, "/rollback?version=two", headers=TOKEN)[0] == 422


def test_automatic_adaptation_that_the_guard_refuses(deployed, tmp_path):
    with Deployment(copy_of(deployed, tmp_path / "model"), device="cpu") as model:
        model.settings = type(model.settings)("auto", 64, model.settings.changes)
        with running(model) as port:
            observe(port, NEGATIVE[:64])
            assert not model.wait().accepted
            assert post(port, "/predict", FILES[0])[1]["version"] == 1
            assert "refused: the model forgot" in ask(port, "/")[2]


def test_changing_the_model_needs_the_token(model):
    with running(model, token=None) as port:
        for path in ("/rollback", "/adapt"):
            status, found = post(port, path, headers=TOKEN)
            assert status == 403 and "--token" in found["advice"]
    with running(model) as port:
        for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "Bearer s\xe9cret"}):
            assert post(port, "/rollback", headers=headers)[0] == 401


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (b"hello", TYPE, 400, "not an image of a known format"),
        (b"", TYPE, 400, "empty"),
        (FILES[0][:-40], TYPE, 400, "truncated"),
        (b"/etc/passwd", TYPE, 400, "no usable image"),
        (b"file:///etc/passwd", TYPE, 400, "no usable image"),
        (huge_png(60_000), TYPE, 400, "too many pixels"),
        (huge_png(200), TYPE, 400, "too many pixels: 200×200, at most 0.01 million"),
        (bytes(30_001), TYPE, 413, "more than 30,000 bytes"),
        (FILES[0], {"Content-Type": "text/plain"}, 415, "the body is text/plain"),
        (FILES[0], {}, 415, "of no type"),
    ],
)
def test_bad_images(model, body, headers, status, words):
    with running(model, max_bytes=30_000, max_pixels=10_000) as port:
        found = post(port, "/predict", body, headers)
        assert found[0] == status and words in found[1]["error"] and found[1]["advice"], found
        assert post(port, "/predict", FILES[0])[0] == 200


def test_a_body_without_length_is_cut_off_too(model):
    with running(model, max_bytes=30_000) as port:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        client.request("POST", "/predict", iter([bytes(20_000)] * 2), TYPE, encode_chunked=True)
        assert client.getresponse().status == 413
        client.close()


def test_other_paths_and_methods(port):
    for path, method, status in (("/../etc/passwd", "GET", 404), ("/predict", "GET", 405), ("/docs", "GET", 404)):
        found = ask(port, path, method=method)
        assert found[0] == status and found[2]["advice"].startswith("Pages: GET / ")
    assert 'path="other",status="404"} 2' in ask(port, "/metrics")[2]


def test_names_are_text(model, port):
    assert post(port, "/observe?name=../../../etc/passwd%1b[2J%3Cscript%3E", FILES[0])[0] == 200
    observe(port, NEGATIVE[:63])
    (window,) = journal_of(model.folder, "window")
    assert window["level"] == "drifted"
    assert sorted(path.name for path in model.folder.parent.iterdir()) == ["model"]
    assert "<script" not in ask(port, "/")[2]


def test_clients_that_hang_keep_nobody_waiting(model, monkeypatch):
    monkeypatch.setattr(serve, "HEAD_SECONDS", 0.3)
    with running(model, timeout=0.3) as port:
        silent, slow = (socket.create_connection(("127.0.0.1", port), 10) for _ in range(2))
        head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 1000\r\n\r\n"
        slow.sendall(head + b"\x89PNG")
        assert post(port, "/predict", FILES[0])[0] == 200
        answer = b"".join(iter(lambda: slow.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.3 s" in answer
        assert silent.recv(10) == b""  # closed
        half = socket.create_connection(("127.0.0.1", port), 10)
        half.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        found = b""
        while b"problem" not in found:
            found += half.recv(4096)
        half.sendall(b"GET /heal")
        assert half.recv(10) == b""
        for client in (silent, slow, half):
            client.close()


def test_clients_that_ask_too_often(model, monkeypatch):
    now, rate = [0.0], serve._Rate(3)
    with monkeypatch.context() as patch:
        patch.setattr(serve.time, "monotonic", lambda: now[0])
        assert [rate.allows("a") for _ in range(5)] == [True] * 3 + [False] * 2
        assert rate.allows("b")
        now[0] += 0.4
        assert [rate.allows("a") for _ in range(2)] == [True, False]
    with running(model, rate=0.01) as port:
        assert ask(port, "/versions")[0] == 200
        status, headers, found = ask(port, "/versions")
        assert (status, headers["retry-after"], found["error"]) == (429, "1", "too many requests")
        assert ask(port, "/healthz")[0] == 200


def test_too_many_images_at_once(model, monkeypatch):
    monkeypatch.setattr(serve, "IN_WORK", 1)
    with running(model) as port:
        slow = socket.create_connection(("127.0.0.1", port), 10)
        slow.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(200):
            status, found = post(port, "/predict", FILES[0])
            if status == 503:
                break
        assert status == 503 and "Try again" in found["advice"]
        slow.close()


def test_an_answer_that_is_no_number_fails_alone(model, monkeypatch):
    usual, poison = Model.logits, KNOWN[0]

    def logits(self, images):
        found = usual(self, images)
        found[[bool((image == poison).all()) for image in images]] = float("nan")
        return self._checked(found)

    monkeypatch.setattr(Model, "logits", logits)
    with running(model) as port:
        found = {}
        threads = [
            threading.Thread(target=lambda k=k: found.update({k: post(port, "/predict", FILES[k])})) for k in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[k][0] for k in range(8)] == [500] + [200] * 7
        assert "NaN or infinity" in found[0][1]["error"] and "rollback" in found[0][1]["advice"]


def test_a_full_disk(model, port, monkeypatch):
    def full(*_, **__):
        raise RunDirectoryError(
            "cannot write journal.jsonl: No space left on device. Make room and repeat the command."
        )

    with monkeypatch.context() as patch:
        patch.setattr(Store, "note", full)
        observe(port, KNOWN[:64])
        assert "No space left" in ask(port, "/healthz")[2]["problem"]
        assert "No space left" in ask(port, "/")[2]
    observe(port, DARK[:64])
    assert ask(port, "/healthz")[2]["problem"] == ""
    with monkeypatch.context() as patch:
        patch.setattr(Store, "add", full)  # while the version is saved
        assert post(port, "/adapt", headers=TOKEN)[0] == 202
        with pytest.raises(RunDirectoryError):
            model.wait()
    assert post(port, "/predict", FILES[0])[1]["version"] == 1
    assert "stage on domain-2 failed" in ask(port, "/")[2]


def test_a_second_process_is_refused(model):
    done = ratp("serve", model.folder)
    assert done.code == 2 and "Only one process at a time can use a deployment" in done.err, done


def test_a_port_in_use(deployed, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
        done = ratp("serve", copy_of(deployed, tmp_path / "model"), "--port", number, "--device", "cpu")
    assert done.code == 2 and "Address already in use. Choose another" in done.err, done


def test_other_machines_are_warned_of(deployed, tmp_path, monkeypatch):
    monkeypatch.setattr(serve.uvicorn.Server, "run", lambda *_, **__: None)
    model = copy_of(deployed, tmp_path / "model")
    for host, warns in (("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)):
        done = ratp("serve", model, "--host", host, "--port", 0, "--device", "cpu")
        assert done.code == 0 and ("can be reached from other machines" in done.err) is warns, done


@pytest.mark.parametrize("option", ["--rate", "--timeout", "--max-bytes"])
def test_limits_are_positive(deployed, option):
    done = ratp("serve", deployed, option, "0")
    assert done.code == 2 and f"{option} must be above 0" in done.err, done


def test_without_the_libraries_the_command_says_how_to_install_them(deployed, monkeypatch):
    monkeypatch.delitem(sys.modules, "ratp.deploy.serve")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    done = ratp("serve", deployed)
    assert done.code == 2 and 'pip install "ratp-cdsl[serve]"' in done.err, done


def test_answers_are_those_of_the_decoded_image(model, port):
    """Other formats and sizes are resized as in a run."""
    large = Image.fromarray(KNOWN[3].permute(1, 2, 0).numpy()).resize((96, 64))
    small = torch.as_tensor(np.array(large.resize((32, 32), Image.Resampling.BILINEAR))).permute(2, 0, 1)
    expected = model.answer(small[None])
    for kind in ("PNG", "BMP"):
        found = post(port, "/predict", encode(large, kind), {"Content-Type": "application/octet-stream"})[1]
        assert found["confidence"] == pytest.approx(expected.confidence[0], abs=1e-4)
