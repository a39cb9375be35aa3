"""``ratp doctor``: what it finds, what it says to do, and what it calls an obstacle."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from helpers import TINY_OPTIONS, ratp
from own_images import image_files, write_zip
from ratp import __version__
from ratp._core.locks import exclusive
from ratp.cli import doctor as doctor_folders
from ratp.cli import doctor as doctor_machine
from ratp.cli.doctor import versions
from ratp.data.cache.decoded import open_decoded
from ratp.functional import kernels

KEPT = Path(__file__).parents[1] / "fixtures" / "runs" / "versioned"
RUN = ("run", "demo", "--method", "source-only", "--device", "cpu", "--quiet", *TINY_OPTIONS)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(doctor_folders, "LEAST_FREE_DISK", 0)
    monkeypatch.setenv("RATP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RATP_DATA", raising=False)
    return folder


def run_doctor(*options, code=0):
    """The findings by check; the last of several."""
    result = ratp("doctor", "--json", *options)
    assert (result.code, result.err) == (code, "")
    data = json.loads(result.out)
    assert data["ok"] is (code == 0)
    return {finding["what"]: finding for finding in data["findings"]}


def test_a_healthy_machine_is_shown_within_80_columns(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = ratp("doctor")
    assert result.code == 0
    for words in (__version__, torch.__version__.split("+")[0], os.environ["RATP_CACHE"], str(here), "memory"):
        assert words in "".join(line[14:].rstrip() for line in result.out.splitlines()) + result.out
    assert max(map(len, result.out.splitlines())) <= 80
    assert "All is well" in result.err  # benchmarks need not be there


def test_it_writes_nothing(here):
    run_doctor()
    assert list(here.parent.rglob("*")) == [here]


class TestVersions:
    def test_missing_or_old_packages_block(self, monkeypatch):
        installed = {"old": "1.9.3", "new": "1.10", "odd": "2.0.0rc1+cu"}
        monkeypatch.setattr(doctor_machine, "package_version", installed.get)
        found = {f.what: f for f in versions(["old>=1.10", "new>=1.9.9", "odd>=2.0", "gone>=3", "new; extra == 'x'"])}
        assert found["packages"].found == "new 1.10, odd 2.0.0rc1+cu"
        assert (found["old"].ok, found["old"].blocks) == (False, True)
        assert "1.10 is needed" in found["old"].found
        assert found["gone"].advice == "pip install 'gone>=3'"

    def test_blocking_finding_fails_the_command(self, monkeypatch):
        monkeypatch.setattr(doctor_machine, "package_version", lambda name: None)
        found = run_doctor(code=1)
        assert found["torch"]["advice"].startswith("pip install 'torch>=")
        result = ratp("doctor")
        assert result.code == 1
        assert "must be fixed first" in result.err

    def test_all_dependencies_are_checked(self):
        for name in ("torch", "safetensors", "typer", "jinja2"):
            assert name in run_doctor()["packages"]["found"]
        assert "ray" in run_doctor()["optional"]["found"]


class TestMachine:
    def test_low_memory_only_warns(self, monkeypatch):
        monkeypatch.setattr(doctor_machine, "free_memory", lambda: 2**20)
        found = run_doctor()["memory"]
        assert not found["ok"]
        assert "--jobs 1" in found["advice"]

    def test_apple_gpu_is_named(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M2")
        found = run_doctor()
        assert found["mps"]["found"] == "Apple M2, GPU; runs use it only with --device mps"
        assert "gpu" not in found

    def test_driver_without_matching_torch(self, monkeypatch, here):
        (here.parent / "version").write_text("NVRM version: NVIDIA UNIX Module  550.54.15  Tue\n")
        monkeypatch.setattr(doctor_machine, "_DRIVER", here.parent / "version")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert "550.54.15" in run_doctor()["gpu"]["found"]
        assert not run_doctor()["gpu"]["ok"]

    @pytest.mark.parametrize(("capability", "precisions"), [((9, 0), "fp32/tf32/bf16"), ((7, 5), "fp32")])
    def test_a_gpu_without_graphs_and_kernels(self, monkeypatch, capability, precisions):
        def refuse(*_):
            raise RuntimeError("no graphs here")

        answers = {"is_available": True, "device_count": 1, "mem_get_info": (2**33, 2**34)}
        answers |= {"get_device_capability": capability, "get_device_name": "Toy 1"}
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        monkeypatch.setattr(kernels, "usable", lambda device: False)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", refuse)
        found = run_doctor()["cuda:0"]
        assert found["ok"]
        for words in ("Toy 1", "8.0 GiB of 16.0 GiB free", precisions, "no CUDA graphs", "no Triton kernels"):
            assert words in found["found"]
        assert ("bf16" in found["found"]) == (capability >= (8, 0))

    def test_a_full_disk_blocks(self, monkeypatch):
        monkeypatch.setattr(doctor_folders, "LEAST_FREE_DISK", 2**80)
        assert "free some space" in run_doctor(code=1)["folder"]["advice"]

    def test_unwritable_cache_only_warns(self, monkeypatch, here):
        (here / "file").write_text("")
        monkeypatch.setenv("RATP_CACHE", str(here / "file" / "cache"))
        found = run_doctor()["cache"]
        assert not found["ok"]
        assert "RATP_CACHE" in found["advice"]


class TestData:
    def test_missing_data_only_advises(self):
        found = run_doctor()["data"]
        assert not found["ok"]
        assert "ratp data get digits" in found["advice"]

    def test_a_missing_folder_counts_as_a_problem_only_if_it_was_named(self, here, monkeypatch):
        assert "All is well" in ratp("doctor").err
        monkeypatch.setenv("RATP_DATA", str(here / "nowhere"))
        assert "1 of" in ratp("doctor").err

    def test_missing_domain_is_named_with_command(self, here, monkeypatch):
        monkeypatch.setenv("RATP_DATA", str(here / "mine"))
        for domain in ("photo", "sketch"):
            write_zip(here / "mine" / "pacs" / f"{domain}.zip", image_files(("dog", "elephant"), count=1))
        found = run_doctor()
        assert found["data"]["ok"]
        assert found["pacs"]["found"] == "2 of 4 domains; missing: art_painting, cartoon"
        assert found["pacs"]["advice"] == "ratp data get pacs"
        assert found["digits"]["ok"]  # none is present: none is needed

    def test_a_damaged_domain(self, here):
        for domain in ("photo", "art_painting", "cartoon", "sketch"):
            path = write_zip(here / "data" / "pacs" / f"{domain}.zip", image_files(("dog", "elephant"), count=1))
        assert run_doctor()["pacs"]["found"] == "all 4 domains"
        path.write_bytes(path.read_bytes()[:-30])
        assert run_doctor()["pacs/sketch"]["advice"] == (
            "move it away and run ratp data get pacs/sketch, or restore it from a copy"
        )

    def test_bad_image_advice_removes_nothing(self, here):
        path = write_zip(
            here / "data" / "pacs" / "photo.zip", image_files(("dog", "elephant"), count=1) | {"dog/bad.png": b""}
        )
        found = run_doctor("--thorough")["pacs/photo"]
        assert found["found"] == "1 of 3 images cannot be used"
        assert found["advice"] == f"ratp data check {path.relative_to(here)} names them"

    def test_only_thorough_check_counts_images(self, here):
        write_zip(here / "data" / "pacs" / "photo.zip", image_files(("dog", "elephant"), count=1))
        assert "pacs/photo" not in run_doctor()
        found = run_doctor("--thorough")["pacs/photo"]
        assert found["ok"]
        assert "2 of 1,670 published images" in found["found"]


class TestCache:
    @pytest.fixture
    def entry(self, here):
        path = write_zip(here.parent / "pictures.zip", image_files(("a", "b"), count=2))
        open_decoded(path, 16)
        return here.parent / "cache" / "decoded"

    def test_cache_is_counted_but_not_used(self, entry):
        before = {path: path.stat().st_mtime_ns for path in entry.iterdir()}
        assert run_doctor()["decoded"]["found"].startswith("1 domains decoded")
        assert run_doctor()["decoded"]["ok"]
        assert {path: path.stat().st_mtime_ns for path in entry.iterdir()} == before

    @pytest.mark.parametrize("ending", ["manifest.json", "images"])
    def test_damage_is_found_and_advice_clears_it(self, entry, ending):
        (path,) = entry.glob(f"*.{ending}")
        path.write_bytes(path.read_bytes()[:-1])
        found = run_doctor()["decoded"]
        assert "1 damaged" in found["found"]
        assert "ratp data cache --clear" in found["advice"]
        assert ratp("data", "cache", "--clear", "--quiet").code == 0
        assert run_doctor()["decoded"]["ok"]

    @pytest.mark.faults(25, "`ratp doctor` counts damaged domains in the cache")
    def test_changed_pixels_are_found(self, entry, monkeypatch):
        (path,) = entry.glob("*.images")
        path.write_bytes(bytes(byte ^ (k % 7 == 0) for k, byte in enumerate(path.read_bytes())))
        assert "every byte checked; 1 damaged" in run_doctor()["decoded"]["found"]
        monkeypatch.setattr(doctor_folders, "QUICKLY_READ", 0)
        assert run_doctor()["decoded"]["ok"]
        assert "every byte checked; 1 damaged" in run_doctor("--thorough")["decoded"]["found"]

    def test_leftovers_of_killed_writer(self, entry):
        (entry / "0123.part-abc").write_bytes(b"0" * 100)
        assert "1 damaged or incomplete" in run_doctor()["decoded"]["found"]

    def test_source_networks(self, here):
        folder = here.parent / "cache" / "source-models"
        assert ratp(*RUN, "--out", "run").code == 0
        (network,) = folder.glob("*.safetensors")
        assert run_doctor()["networks"]["found"].startswith("1 source networks kept")
        network.write_bytes(network.read_bytes()[:-1])
        assert run_doctor()["networks"]["ok"]
        assert str(network) in run_doctor("--thorough")["networks"]["advice"]


class TestRuns:
    @pytest.mark.slow
    def test_suggested_command_continues_the_run(self, here):
        assert ratp(*RUN, "--seed", "7", "--order", "reverse", "--out", "runs/a b").code == 0
        (here / "runs" / "a b" / "weights.safetensors").unlink()
        found = run_doctor()["unfinished"]
        assert found["found"] == "runs/a b: 4 of 4 stages done"
        command = shlex.split(found["advice"])
        assert command[0] == "ratp"
        assert ratp(*command[1:], "--device", "cpu", "--quiet").code == 0
        assert (here / "runs" / "a b" / "weights.safetensors").exists()
        assert "unfinished" not in run_doctor()
        assert run_doctor()["runs"]["found"] == "1 here: 1 finished, 0 running"

    def test_suggested_command_names_non_defaults(self, here):
        options = ["--order", "street>scan", "--subset", "--guard", "act"]
        assert ratp(*RUN, *options, "--out", "runs/a").code == 0
        (here / "runs" / "a" / "weights.safetensors").unlink()
        command = shlex.split(run_doctor()["unfinished"]["advice"])
        assert ratp(*command[1:], "--device", "cpu", "--quiet").code == 0
        assert "unfinished" not in run_doctor()

    def test_run_on_own_images(self, here):
        shutil.copytree(KEPT / "between-stages", here / "mine")
        found = run_doctor()["unfinished"]
        assert found["found"] == "mine: 2 of 3 stages done"
        assert found["advice"] == "the original command with --out mine"

    def test_running_run_is_left_alone(self, here):
        shutil.copytree(KEPT / "between-stages", here / "runs" / "a")
        with exclusive(here / "runs" / "a"):
            found = run_doctor()
        assert found["runs"]["found"] == "1 here: 0 finished, 1 running"
        assert "unfinished" not in found

    def test_damage_killed_processes_and_leftovers(self, here):
        run = shutil.copytree(KEPT / "finished", here / "runs" / "a")
        (run / "matrix.json").write_text("{")
        (run / ".matrix.json.part-abc").write_text("{")
        (run / ".lock").write_text('{"pid": 1}')
        found = run_doctor()
        assert "runs/a/matrix.json is damaged" in found["run"]["found"]
        assert found["locks"]["found"].endswith("processes: a")
        assert found["leftovers"]["found"] == "1 incomplete files in runs"
        assert all(found[name]["advice"] for name in ("run", "locks", "leftovers"))

    def test_run_of_a_study(self, here):
        place = here / "runs" / "studies" / "main" / "x"
        shutil.copytree(KEPT / "between-stages", place)
        (place.parent / "study.json").write_text('{"study": "main"}')
        assert run_doctor()["unfinished"]["advice"] == "ratp study run main.toml (its study)"

    def test_run_of_a_study_in_renamed_folder(self, here):
        place = here / "runs" / "studies" / "again" / "x"
        shutil.copytree(KEPT / "between-stages", place)
        (place.parent / "study.json").write_text('{"study": "main"}')
        assert run_doctor()["unfinished"]["advice"].startswith("ratp study run main.toml --out runs/studies/again ")
