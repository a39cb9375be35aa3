"""What an installation holds, what it declares, and where it refuses to start."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import ratp
from ratp._core import environment
from ratp.cli import doctor
from ratp.cli.doctor import requirements
from ratp.data.decode.pixel_file import memory_file

PACKAGE = Path(ratp.__file__).parent
SOURCE = PACKAGE.parents[1]
COMES_WITH = {"PIL": "pillow", "sklearn": "scikit-learn", "starlette": "fastapi", "triton": "torch"}

pytestmark = pytest.mark.skipif(not (SOURCE / "pyproject.toml").is_file(), reason="installed without its source")


def project():
    return tomllib.loads((SOURCE / "pyproject.toml").read_text(encoding="utf-8"))


def files(folder):
    return {path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def test_every_import_is_declared():
    imported = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
    declared = {re.match(r"[\w-]+", need)[0] for need in requirements()}
    libraries = imported - sys.stdlib_module_names - {"ratp"}
    assert {COMES_WITH.get(name, name) for name in libraries} <= declared


def test_all_data_files_are_declared():
    patterns = project()["tool"]["setuptools"]["package-data"]["ratp"]
    declared = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert {path for path in files(PACKAGE) if path.suffix != ".py"} == declared


def test_requirements_of_a_source_tree_that_is_not_installed(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    found = requirements()
    assert set(project()["project"]["dependencies"]) <= set(found)
    assert 'ray; extra == "ray"' in found


@pytest.mark.parametrize(
    ("program", "last_line"),
    [
        ("import ratp.__main__; ratp.__main__.main()", "error: ratp runs on Linux and macOS; on Windows, use WSL."),
        ("from ratp import fit", "ImportError: ratp runs on Linux and macOS; on Windows, use WSL."),
    ],
)
def test_one_sentence_where_files_cannot_be_locked(program, last_line):
    hidden = "import sys; sys.modules['fcntl'] = sys.modules['resource'] = None"
    done = subprocess.run([sys.executable, "-c", f"{hidden}; {program}"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == last_line
    assert ("Traceback" in done.stderr) == last_line.startswith("ImportError")


def test_calls_of_linux_alone_have_another_way():
    """Whoever calls what macOS does not have asks first, in the same module; only these files read ``/proc``."""
    asked = {"sched_getaffinity": "_core/environment.py", "memfd_create": "data/decode/pixel_file.py"}
    absent = re.compile(
        "copy_file_range|eventfd|fdatasync|pidfd_open|pipe2|posix_fadvise|posix_fallocate|prlimit|sched_setaffinity|splice|"
        "unshare|epoll|O_(DIRECT|NOATIME|PATH|TMPFILE)|MAP_POPULATE|F_OFD_SETLK|SIG(RTMIN|PWR)|SOCK_CLOEXEC|SO_PEERCRED"
    )
    reading = set()
    for path in PACKAGE.rglob("*.py"):
        name, nodes = path.relative_to(PACKAGE).as_posix(), list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        assert not [call for call in used if absent.fullmatch(call)], name
        for call in used & asked.keys():
            assert name == asked[call]
            assert f"hasattr(os, '{call}')" in {ast.unparse(node) for node in nodes}
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        reading |= {name} if any(text.startswith(("/proc", "/sys", "/dev/shm")) for text in texts) else set()
    assert reading == {"_core/environment.py", "cli/doctor.py", "data/decode/pixel_file.py"}


def test_machine_without_proc(monkeypatch):
    """As on macOS: the processor is named, memory and cores are counted, no NVIDIA driver is found."""
    opened = Path.open

    def only_others(path, *args, **kwargs):
        if path.is_relative_to("/proc"):
            raise FileNotFoundError(path)
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", only_others)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delattr(os, "memfd_create", raising=False)
    environment._processor_name.cache_clear()
    found = {finding.what: finding for finding in doctor.machine()}
    assert environment.device_name(torch.device("cpu"))
    assert environment.usable_cores() == os.cpu_count()
    assert re.match(r"[\d.,]+ [KMGT]", found["memory"].found)
    os.close(memory_file())
    environment._processor_name.cache_clear()


@pytest.mark.slow
def test_wheel_and_sdist_hold_the_package(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    shutil.copytree(PACKAGE, tree / "src" / "ratp", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(SOURCE / name, tree)
    build = "from setuptools import build_meta as b; b.build_sdist('..'); b.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)

    name = f"ratp_cdsl-{ratp.__version__}"
    whole = {f"ratp/{path.relative_to(PACKAGE)}" for path in files(PACKAGE)}
    with tarfile.open(tmp_path / f"{name}.tar.gz") as archive:
        assert {f"{name}/src/{path}" for path in whole} < set(archive.getnames())
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl") as wheel:
        assert {path for path in wheel.namelist() if path.startswith("ratp/")} == whole
        wheel.extractall(tmp_path / "installed")
    (installed,) = importlib.metadata.distributions(name="ratp-cdsl", path=[str(tmp_path / "installed")])
    assert installed.version == ratp.__version__
    (command,) = installed.entry_points
    assert (command.name, command.value) == ("ratp", "ratp.__main__:main")
