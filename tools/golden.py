"""Records what every method and preset computes, and checks later that not one bit changed.

``python tools/golden.py record FILE``, then after every change ``python tools/golden.py check FILE``. It tries whatever
``ratp`` is imported, by its public names, its command line and the files of its runs alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

PROCESSES = 2
# A second or two a case, and enough for predictions of more than one class.
SIZES = {"epochs": 3, "steps": 8, "batch": 16, "lr": 0.01, "memory": 40}
SIZES |= {"network.width": 0.1, "network.hidden": 48, "network.dim": 16}
# A confidence that is reached, for copies of target images; fewer views than would take long.
OF_METHOD = {"ratp": {"r_con": 0.2}, "arc": {"r_con": 0.2}, "cotta": {"views": 2}}
COPIES = {"augment": True, "r_con": 0.2}
# Non-default values, each its own case.
SWITCHES = {
    "ratp": "labelling=softmax labelling=shot labelling=bmd labelling=truth alignment=pl alignment=scl alignment=pcl "
    "pca.weight=0 pca.similarity=dot pca.negatives=all pca.form=published augment=false augment_replay=false "
    "joint_batch=false refresh=0 t2pl.normalise=false t2pl.rounds=1 t2pl.top_set=union t2pl.classes=all "
    "distill.on=embedding distill.data=target distill.student=eval memory.selection=nearest memory.features=embedding "
    "memory.labels=final memory.replay=separate memory.replay=none sgd.schedule=constant sgd.schedule=per-step "
    "randmix.adain=affine randmix.redraw_adain=true randmix.noise_per=batch randmix.weights_per=sample "
    "randmix.init=normal randmix.tanh=false randmix.colour_branch=false network.bottleneck=one "
    "source_transform.crop=true",
    "arc": "replay=0 consistency.weight=0 distill=0 pca.weight=0 refresh=0 randmix.weights_per=batch",
    "shot": "replay=separate replay=none",
    "shot+": "replay=separate replay=none",
    "shot++": "replay=separate replay=none mixmatch.new_classifier=true",
    "gsfda": "replay=separate replay=none",
    "bmd": "replay=separate replay=none extractor=true",
    "aucid": "replay=none",
    "snr": "replay=none",
    "pcl": "replay=none projection=false",
    "l2d": "replay=none",
    "pden": "replay=none",
    "adabn": "eval_bn=running",
    "tent": "replay=none step.optimiser=sgd eval_bn=running",
    "t3a": "exemplars=true reset=true",
    "eata": "replay=none weighted=false",
    "cotta": "replay=none loss=symmetric",
    "adacon": "replay=none decay=constant first_look=false",
    "sar": "replay=none freeze_top=false recover_below=9",
    "rmt": "replay=none projector=0 step.optimiser=sgd",
    "roid": "replay=none prior=false consistency=false eval_bn=running",
    "deyo": "replay=none freeze_top=false weighted=false",
}
PRESETS = {"ratp": ["official", "paper"]}
SHORT = {"order": "scan>photo>font", "subset": True}
Case = Mapping[str, Any]


def cases() -> dict[str, Case]:
    """What is run: the arguments of each request, by the name of the case."""
    import ratp

    listing = subprocess.run([sys.executable, "-m", "ratp", "methods", "--json"], check=True, stdout=subprocess.PIPE)
    methods = [method["name"] for method in json.loads(listing.stdout)["methods"]]
    found = {
        f"{name} {preset}": request(name, preset=preset)
        for name in methods
        for preset in PRESETS.get(name, ["official"])
    }
    for name, switches in SWITCHES.items():
        for switch in switches.split():
            found[f"{name} {switch}"] = request(name, dict([switch.split("=")]), **SHORT)
    for name in ("shot", "gsfda", "pcl"):
        found[f"{name} with RandMix"] = request(name, COPIES, **SHORT)
    for name in ("ratp", "pden"):  # both have a stage undone
        found[f"{name} guard=act"] = request(name, guard="act", **SHORT)
    found["ratp guard=off"] = request("ratp", guard="off", **SHORT)
    found["ratp another order"] = request("ratp", order="street>font>photo>scan", seed=7)
    example = Path(ratp.__file__).parents[2] / "examples" / "self_training.py"
    return found | {"own file": request(str(example), {"threshold": 0.3}, **SHORT)}


def request(method: str, changes: Mapping[str, Any] | None = None, **others: Any) -> Case:
    """The arguments of a small request."""
    return {"method": method, "changes": SIZES | OF_METHOD.get(method, {}) | (changes or {}), **others}


def run(item: tuple[str, Case]) -> tuple[str, dict[str, str]]:
    """A case and the hashes of what it gives, or its error."""
    import torch

    import ratp

    torch.set_num_threads(1)
    name, case = item
    with tempfile.TemporaryDirectory() as folder:
        try:
            ratp.Run(ratp.resolve(ratp.RunRequest(device="cpu", **case)), folder, reuse_source=False).execute()
            return name, hashes(Path(folder))
        except Exception as error:  # reported for that case
            return name, {"error": f"{type(error).__name__}: {error}"}


def hashes(folder: Path) -> dict[str, str]:
    """Hashes of all numbers in a run's directory, but of no time."""
    journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    epochs = [(e["means"], e["statistics"]) for e in journal if e["event"] == "epoch"]
    stages = [
        (e["statistics"], (e.get("guard") or {}).get("signs"), is_undone(e))
        for e in journal
        if e["event"] == "stage_finished"
    ]
    return {
        "state": of_tensors(folder / "state.safetensors"),
        "weights": of_tensors(folder / "weights.safetensors"),
        "matrix": of_values(json.loads((folder / "matrix.json").read_text())["accuracy"]),
        "epochs": of_values(epochs),
        "stages": of_values(stages),
    }


def is_undone(event: Mapping[str, Any]) -> bool:
    """Whether the guard went back to the model before the stage."""
    return bool((event.get("guard") or {}).get("rolled_back"))


def of_tensors(path: Path) -> str:
    """The hash of a file's tensors: names, kinds, shapes and bytes."""
    from safetensors import deserialize

    total = sha256()
    for name, tensor in sorted(deserialize(path.read_bytes()), key=lambda item: item[0]):
        total.update(json.dumps([name, tensor["dtype"], tensor["shape"]]).encode() + bytes(tensor["data"]))
    return total.hexdigest()


def of_values(values: Any) -> str:
    """The hash of plain data, numbers to the last digit."""
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def run_all(chosen: Mapping[str, Case]) -> dict[str, dict[str, str]]:
    """The hashes of all cases."""
    with get_context("spawn").Pool(PROCESSES) as pool:
        return dict(pool.imap_unordered(run, chosen.items()))


def record(file: Path) -> int:
    """Writes the hashes of all cases; 1 if one of them cannot be run."""
    found = run_all(cases())
    failed = [f"{name}: {values['error']}" for name, values in found.items() if "error" in values]
    print(*failed, f"{len(found)} cases, {len(failed)} failed", sep="\n")
    if not failed:
        file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return bool(failed)


def check(file: Path, only: list[str]) -> int:
    """Prints the cases that differ from the record; returns 1 if any does."""
    known, current = json.loads(file.read_text()), cases()
    wanted = only or sorted(known.keys() | current.keys())
    if strange := [name for name in wanted if name not in known.keys() | current.keys()]:
        raise SystemExit(f"no such case: {', '.join(strange)}. There are: {', '.join(sorted(known))}.")
    found = run_all({name: case for name, case in current.items() if name in wanted and name in known})
    differ = {}
    for name in wanted:
        if name not in known or name not in found:
            differ[name] = "not recorded" if name not in known else "missing"
        elif found[name] != known[name]:
            unlike = [part for part in known[name] if found[name].get(part) != known[name][part]]
            differ[name] = found[name].get("error") or ", ".join(unlike)
    print(*(f"{name}: {what}" for name, what in differ.items()), f"{len(wanted)} cases, {len(differ)} differ", sep="\n")
    return bool(differ)


def main() -> int:
    """Records or checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("record", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="check these cases alone")
    given = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"RATP_CACHE": cache, "OMP_NUM_THREADS": "1"}
        code = record(given.file) if given.action == "record" else check(given.file, given.only)
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
