"""Throughput of ``ratp serve`` on the loopback with several clients, relative to the bare forward pass.

ResNet-50 with random weights at 224×224 pixels on the CPU. The bare pass takes batches of 16 decoded images; clients
send JPEG files, one per request, and wait for each answer. Measured in turns. Writes ``benchmarks/serve.json``.
"""

from __future__ import annotations

import argparse
import http.client
import io
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import torch
from PIL import Image

from ratp._core.environment import describe_environment
from ratp._core.files import write_json
from ratp.data.domain import LabelledDomain
from ratp.deploy.deployment import Deployment
from ratp.runs.load import load

SIZE, CLIENTS, BATCH = 224, 8, 16
NETWORK = {"network.backbone": "resnet50", "size": SIZE, "epochs": 1, "steps": 1, "batch": 4}


def noise(count: int, seed: int) -> torch.Tensor:
    """Random images, coarse enough to be small as JPEG."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randint(256, (count, 3, 14, 14), generator=generator).float()
    return torch.nn.functional.interpolate(coarse, (SIZE, SIZE), mode="bilinear").byte()


def encoded(image: torch.Tensor) -> bytes:
    """An image as a JPEG file."""
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=90)
    return file.getvalue()


def deploy(folder: Path) -> Path:
    """Makes a deployment of an untrained network."""
    for place, count in (("source/a", 12), ("source/b", 12), ("target", 8)):
        (folder / place).mkdir(parents=True)
        for k, image in enumerate(noise(count, len(place))):
            (folder / place / f"{k}.jpg").write_bytes(encoded(image))
    changes = [word for name, value in NETWORK.items() for word in ("--set", f"{name}={value}")]
    domains = ["--source", folder / "source", "--targets", folder / "target", "--method", "source-only"]
    words = ["run", "folders", *domains, *changes, "--weights", "none", "--device", "cpu", "--quiet", "--guard", "off"]
    subprocess.run([sys.executable, "-m", "ratp", *map(str, words), "--out", str(folder / "run")], check=True)
    labels = torch.arange(40) % 2
    source = LabelledDomain("source", noise(40, 1), labels, ("a", "b"))
    Deployment.create(folder / "run", folder / "deployed", source, device="cpu").close()
    return folder / "deployed"


def ask(port: int, path: str, files: list[bytes], seconds: float) -> float:
    """Images per second that clients get answered."""
    answered, end = [0] * CLIENTS, time.perf_counter() + seconds

    def work(client: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while time.perf_counter() < end:
            connection.request("POST", path, files[answered[client] % len(files)], {"Content-Type": "image/jpeg"})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200
            answered[client] += 1

    started = time.perf_counter()
    threads = [threading.Thread(target=work, args=(k,)) for k in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(answered) / (time.perf_counter() - started)


def forward(folder: Path, seconds: float) -> float:
    """Images per second of the bare forward pass."""
    method, images = load(folder, device="cpu").method, noise(BATCH, 2)
    method.predict(images)
    started, done = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        method.predict(images)
        done += BATCH
    return done / (time.perf_counter() - started)


def main() -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    files = [encoded(image) for image in noise(16, 3)]
    with tempfile.TemporaryDirectory() as name:
        deployed = deploy(Path(name))
        command = [sys.executable, "-m", "ratp", "serve", str(deployed), "--port", "0", "--device", "cpu"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            address = next(word for word in server.stderr.readline().split() if word.startswith("http")).rstrip(";")
            port = int(address.rpartition(":")[2])
            ask(port, "/predict", files, 1.0)
            rounds = []
            for _ in range(options.rounds):
                bare = forward(deployed / "run", options.seconds)
                found = {
                    "bare": bare,
                    **{path: ask(port, f"/{path}", files, options.seconds) for path in ("predict", "observe")},
                }
                rounds.append(found)
                print({name: round(value, 2) for name, value in found.items()}, flush=True)
            server.terminate()
    ratios = {path: median(found[path] / found["bare"] for found in rounds) for path in ("predict", "observe")}
    result = {
        "network": "resnet50",
        "size": SIZE,
        "clients": CLIENTS,
        "bare_batch": BATCH,
        "images_per_second": {name: median(found[name] for found in rounds) for name in rounds[0]},
        "relative_to_bare": ratios,
        "environment": describe_environment(torch.device("cpu"), "fp32"),
    }
    write_json(Path(__file__).with_name("serve.json"), result)
    print(ratios)


if __name__ == "__main__":
    main()
