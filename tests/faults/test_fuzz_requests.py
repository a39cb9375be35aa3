"""Any request and any folder gives a plan or a stream, or a readable error."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from warm import attempt

from helpers import CLASSES, TINY, toy_plan
from own_images import encode, make_picture
from ratp.config import as_dict
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest
from ratp.streams import STREAMS
from ratp.streams.stream import DataOptions
from ratp.studies.file import read_study
from tiny_study import grid

pytestmark = pytest.mark.slow

SWITCHES = sorted({**as_dict(toy_plan().config), **as_dict(toy_plan().recipe)})
VALUES = ["0", "-1", "1e400", "nan", "true", "null", "", " ", "[]", "1,2", "9" * 400, "画像", "\x00", "../..", "{}"]
text = st.text(max_size=12)


@pytest.mark.faults(19, "ratp accepts a request or reports all its mistakes")
@settings(max_examples=150)
@given(
    stream=st.sampled_from(["demo", "folders", *STREAMS]) | text,
    method=st.sampled_from(["ratp", "shot", "rapt", "my.py"]) | text,
    order=st.sampled_from(["default", "reverse", "scan>photo", "scan>scan", ">", "scan,,photo", "a>" * 50]) | text,
    preset=st.sampled_from(["official", "paper"]) | text,
    seed=st.sampled_from(["2022", "-1", "1e3", str(2**64), "0x10", " 7 "]) | text,
    changes=st.dictionaries(st.sampled_from(SWITCHES) | text, st.sampled_from(VALUES) | text, max_size=3),
    device=st.sampled_from(["cpu", "cuda:99", "mps", "meta"]) | text,
    weights=st.sampled_from(["none", "auto", "nowhere.safetensors", "."]) | text,
)
@example("demo", "ratp", "default", "official", "1", {"network.width": "1e9"}, "cpu", "none")
def test_any_request_gives_plan_or_mistakes(stream, method, order, preset, seed, changes, device, weights):
    arguments = {"stream": stream, "method": method, "order": order, "preset": preset, "seed": seed, "device": device}
    plan, _ = attempt(lambda: resolve(RunRequest(**arguments, changes=changes, weights=weights)))
    assert plan is None or len(set(plan.order)) == len(plan.order) > 1


@pytest.mark.faults(19, "ratp accepts a study file or reports all its mistakes")
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 30), st.sampled_from(VALUES) | text), min_size=1, max_size=3
    )
)
def test_any_study_file_gives_study_or_mistakes(tmp_path, cuts):
    content = 'title = "Tiny"\n' + grid('methods = ["ratp", "shot"]', "seeds = [1, 2]", "sweep = { lr = [0.1, 0.2] }")
    for place, length, new in cuts:
        at = int(place * len(content))
        content = content[:at] + new + content[at + length :]
    (tmp_path / "study.toml").write_text(content, errors="replace")
    base = RunRequest(device="cpu", weights="none")
    study, error = attempt(lambda: read_study(tmp_path / "study.toml", tmp_path / "out", base))
    assert study.entries if study else "study.toml" in error


PICTURE = encode(make_picture(0, 1, side=8))
CONTENTS = {"image": PICTURE, "cut": PICTURE[:40], "empty": b"", "page": b"<html>", "zip": b"PK\x03\x04"}
parts = st.sampled_from([*CLASSES, ".", "..x", ".hidden", "画像", "naïve ü", "A", "a", "x" * 120, "con", "-rf", "[/b]"])
names = st.lists(parts, min_size=0, max_size=3)
endings = st.sampled_from([".png", ".PNG", ".jpg", ".txt", "", ".zip", ".png.png"])
trees = st.lists(st.tuples(names, endings, st.sampled_from([*CONTENTS, "image", "image", "image"])), max_size=12)


def plant(root, tree):
    """Makes the files of a tree, as far as they can be."""
    root.mkdir()
    for number, (folders, ending, kind) in enumerate(tree):
        file = root.joinpath(*(part for part in folders if part not in (".", ".."))) / f"{number}{ending}"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(CONTENTS[kind])
        except OSError:
            continue


@pytest.mark.faults(10, "ratp uses the images in any folder tree, or reports everything that is wrong with it")
@pytest.mark.faults(13, "ratp reads files and folders with any names, or names those that it cannot read")
@settings(max_examples=40)
@given(source=trees, target=trees, on_bad=st.sampled_from(["stop", "skip"]))
def test_any_folders_give_stream_or_mistake(tmp_path_factory, source, target, on_bad):
    root = tmp_path_factory.mktemp("trees")
    plant(root / "day", [*source, *(([name], ".png", "image") for name in CLASSES[:2] for _ in range(2))])
    plant(root / "night", target)
    sizes = {**TINY, "network.backbone": "dtn"}
    arguments = {"source": root / "day", "targets": (root / "night",), "data": DataOptions(None, on_bad, "drop")}
    stream, _ = attempt(lambda: resolve(RunRequest("folders", **arguments, changes=sizes, device="cpu")).load_stream())
    usable = sum(kind == "image" and ending.lower() in (".png", ".jpg", ".png.png") for _, ending, kind in target)
    assert stream is None or 0 < len(stream.targets[0]) <= usable
    shutil.rmtree(root)
