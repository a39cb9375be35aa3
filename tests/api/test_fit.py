"""Training in one call: from any kind of data to a result that prints, predicts and can be saved."""

from __future__ import annotations

import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ratp
from helpers import TINY, toy_domains
from own_images import image_files, write_files
from ratp.errors import RatpError

ROOT = Path(__file__).parents[2]
INK, MUD, FOG = toy_domains()
QUICK = {**TINY, "device": "cpu", "progress": False}
PLAIN = {"method": "source-only", **QUICK}
PAIR = INK.images, INK.labels


def fit(source=PAIR, targets=MUD.images, **options):
    return ratp.fit(source, targets, **PLAIN | options)


def test_tensors_data_sets_loaders_and_domains_train_alike():
    data_sets = [TensorDataset(domain.images / 255, domain.labels) for domain in (INK, MUD)]
    loaders = [DataLoader(data, batch_size=4, shuffle=True) for data in data_sets]
    pairs = PAIR, (MUD.images, MUD.labels)
    found = [fit(*both).predict(FOG.images) for both in (pairs, data_sets, loaders)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_labels_of_targets_never_reach_training():
    right, wrong, none = (
        fit(targets=data, method="ratp", **{"randmix.kernel_sizes": "3,5"})
        for data in ((MUD.images, MUD.labels), (MUD.images, MUD.labels * 0), MUD.images)
    )
    assert torch.equal(right.predict(FOG.images), wrong.predict(FOG.images))
    assert torch.equal(right.predict(FOG.images), none.predict(FOG.images))
    assert right.stages[1].after != wrong.stages[1].after
    assert math.isnan(none.stages[1].after)


def test_the_result_prints_and_predicts(tmp_path):
    result = fit(targets={"mud": (MUD.images, MUD.labels), "<fog>": FOG.images})
    text = str(result)
    assert text.splitlines()[0] == "source-only, seed 2022: accuracy in %"
    assert re.search(r"^mud +[\d.]+ +[\d.]+ +[\d.]+$", text, flags=re.M)
    assert re.search(r"^<fog> +– +– +–$", text, flags=re.M)
    assert max(map(len, text.splitlines())) <= 80 and repr(result) == text
    assert "<td>&lt;fog&gt;</td>" in result._repr_html_()
    assert [stage.domain for stage in result.stages] == ["source", "mud", "<fog>"]
    mud = result.stages[1]
    assert (mud.before, mud.after) == (result.matrix.accuracy[0][1], result.matrix.accuracy[1][1])
    assert mud.after == 100 * (result.predict(MUD.images).argmax(1) == MUD.labels).double().mean().item()
    write_files(tmp_path / "new", image_files())
    assert len(result.predict_files(tmp_path / "new").predictions) == len(image_files())
    assert result.classes == ("0", "1", "2", "3")


def test_without_a_folder_it_is_removed_with_the_result_unless_saved(tmp_path):
    result = fit()
    scores, folder = result.predict(FOG.images), result.path
    saved = result.save(tmp_path / "kept")
    with pytest.raises(RatpError, match="kept exists already"):
        result.save(saved)
    assert folder.is_dir()
    del result
    assert not folder.exists()
    assert torch.equal(ratp.load(saved).predict(FOG.images), scores)
    assert ratp.read_run(saved).matrix.complete


def test_a_run_in_a_folder_is_continued_with_the_same_images_only(tmp_path):
    first = fit(out=tmp_path / "run")
    again = fit(out=tmp_path / "run")
    assert again.record.journal == first.record.journal
    with pytest.raises(RatpError, match="Its images have changed"):
        fit(targets=MUD.images.flip(0), out=tmp_path / "run")
    assert (tmp_path / "run").is_dir()


def test_folders_are_the_run_of_the_command_line(tmp_path):
    day, rain = tmp_path / "day", tmp_path / "rain"
    for seed, folder in enumerate((day, rain)):
        write_files(folder, image_files(seed=seed))
    sizes = {**TINY, "network.backbone": "dtn", "size": 32}
    request = ratp.RunRequest("folders", "source-only", source=day, targets=[rain], changes=sizes)
    expected = ratp.resolve(request).digest()
    stream = ratp.own_stream(day, rain)
    assert ratp.resolve(ratp.RunRequest(method="source-only", changes=sizes), stream=stream).digest() == expected
    result = fit(day, {"wet": rain, "memory": INK.images}, backbone="dtn", size=32)
    assert [stage.domain for stage in result.stages] == ["day", "wet", "memory"]


def test_tests_are_what_is_measured():
    result = fit(
        targets={"mud": MUD.images}, tests={"source": (INK.images, INK.labels), "mud": (MUD.images, MUD.labels)}
    )
    for stage, domain in zip(result.stages, (INK, MUD), strict=True):
        right = (result.predict(domain.images).argmax(1) == domain.labels).double().mean().item()
        assert stage.at_end == pytest.approx(100 * right)


def test_a_rollback_warns():
    blank = {"blank": torch.zeros(40, 3, 32, 32)}
    with pytest.warns(ratp.RollbackWarning, match=r"the training on 'blank' was undone: .*guard='off'") as caught:
        result = fit(targets=blank, method="shot")
    assert caught[0].filename == __file__
    assert result.stages[1].rolled_back and result.stages[1].reasons
    assert "blank was rolled back: its images are noise or blank" in str(result)
    assert not fit(targets=blank, method="shot", guard="off").stages[1].rolled_back


def test_class_names():
    names = [("cat", "cow", "dog", "fox")[label] for label in INK.labels.tolist()]
    assert fit((INK.images, names)).classes == ("cat", "cow", "dog", "fox")
    assert fit(classes=("w", "x", "y", "z")).classes == ("w", "x", "y", "z")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"source": INK.images}, r"the source 'source' has no labels: give \(images, labels\)"),
        ({"source": (INK.images, INK.labels + 1)}, r"labels must count from 0, got 1\.\.4\. Subtract 1"),
        ({"source": (INK.images, INK.labels * 0)}, "has a single class"),
        ({"targets": []}, "at least one target"),
        (
            {"targets": (MUD.images, MUD.labels + 1)},
            "'target' has labels that are no classes: 4. The classes are 0, 1, 2, 3",
        ),
        ({"targets": (MUD.images, ["cat"] * 32)}, "labels that are no classes: cat"),
        (
            {"targets": {"mud": MUD.images}, "tests": {"mut": PAIR}},
            "tests for 'mut', which is no domain. Did you mean 'mud'",
        ),
        ({"targets": MUD.images, "tests": {"target": MUD.images}}, "the tests of 'target' have no labels"),
        ({"epohcs": 3}, "Did you mean 'epochs'"),
        ({"method": "ratpp"}, "unknown method 'ratpp'"),
        ({"method": ratp.Method}, "a method must be a name"),
        ({"backbone": "resnet19"}, "unknown backbone 'resnet19'"),
        ({"targets": "no/such/folder"}, "no/such/folder"),
        ({"source": 3}, "domain 'source': give a tensor"),
    ],
)
def test_mistakes(options, expected, tmp_path):
    with pytest.raises(RatpError, match=expected):
        fit(out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_progress_goes_to_standard_error(capfd):
    fit(progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "source-only 2/2 target" in err


def test_an_own_network_loss_and_data_set_in_two_processes(tmp_path, monkeypatch, capsys):
    script = ROOT / "examples" / "own_parts.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 50
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "train"])
    runpy.run_path(str(script), run_name="__main__")
    trained = capsys.readouterr().out
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.startswith("sum of logits: ") and trained.endswith(done.stdout)
    before, after = (float(value) for value in re.search(r"^grey +([\d.]+) +([\d.]+)", trained, flags=re.M).groups())
    assert after > before
