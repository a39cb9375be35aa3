"""Nothing in the package can run code that came in a file, except in the places that SECURITY.md names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ratp
from ratp.errors import RatpError
from ratp.executors.ray_worker import write_files

ROOT = Path(ratp.__file__).parent
POLICY = ROOT.parents[1] / "SECURITY.md"

# What is allowed, and where: every place is named and justified in SECURITY.md.
AUDITED = {
    "unpickling": {"networks/torch_checkpoint.py"},  # tensors only
    "running a file": {"_core/user_code.py"},  # a method or backbone that the user names
    "importing by name": {"__init__.py", "methods/__init__.py", "data/decode/decode.py"},  # from tables in these files
    # this Python, and NVIDIA's control program of MPS
    "starting a process": {"executors/process.py", "executors/mps.py", "data/decode/parallel.py"},
}

IMPORTS = {
    "unpickling": ("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "pandas"),
    "loading YAML": ("yaml", "ruamel"),
    "running a file": ("runpy", "imp", "code", "codeop"),
    "starting a process": ("subprocess", "pty", "multiprocessing"),
    "reaching into memory": ("ctypes", "cffi"),
}
CALLS = {
    "evaluating text": ("eval", "exec", "compile", "builtins.eval", "builtins.exec", "builtins.compile"),
    "importing by name": ("__import__", "builtins.__import__"),
    "starting a process": ("os.system", "os.popen", "os.startfile", "os.fork", "os.posix_spawn", "os.posix_spawnp"),
    "unpickling": ("torch.load", "torch.jit.load", "torch.serialization.load", "torch.hub.load"),
    "unpacking an archive": ("shutil.unpack_archive",),
    "running a file": ("importlib.util.spec_from_file_location", "importlib.machinery.SourceFileLoader"),
}
METHODS = {"extractall": "unpacking an archive", "extract": "unpacking an archive", "exec_module": "running a file"}


def names_of(tree):
    """What the names of a module stand for: ``np`` for numpy, ``load`` for torch.load."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else None
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted(node, names):
    """What a call calls, as a dotted name; empty if that is not a matter of names."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([names.get(node.id) or node.id, *reversed(parts)])


def dangers(source):
    """What a module could do that needs a reason, each with its line."""
    tree = ast.parse(source)
    names = names_of(tree)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for kind, banned in IMPORTS.items():
                found |= {kind for module in modules if module.partition(".")[0] in banned}
        elif isinstance(node, ast.Call):
            found |= dangers_of_call(node, names)
    return found


def dangers_of_call(node, names):
    called = dotted(node.func, names)
    found = {kind for kind, banned in CALLS.items() if called in banned}
    if called.startswith(("os.exec", "os.spawn")):
        found.add("starting a process")
    if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        found.add(METHODS[node.func.attr])
    options = {keyword.arg: keyword.value for keyword in node.keywords}
    if called in ("numpy.load", "numpy.lib.npyio.NpzFile") and not is_constant(options.get("allow_pickle"), False):
        found.add("unpickling")
    if called == "importlib.import_module" and not (node.args and isinstance(node.args[0], ast.Constant)):
        found.add("importing by name")
    if "shell" in options and not is_constant(options["shell"], False):
        found.add("starting a shell")
    return found


def calls_of(module):
    return [node for node in ast.walk(ast.parse((ROOT / module).read_text())) if isinstance(node, ast.Call)]


def is_constant(node, value):
    return isinstance(node, ast.Constant) and node.value is value


def test_only_audited_modules_do_what_needs_a_reason():
    found = {kind: set() for kind in AUDITED}
    for path in ROOT.rglob("*.py"):
        for kind in dangers(path.read_text(encoding="utf-8")):
            found.setdefault(kind, set()).add(path.relative_to(ROOT).as_posix())
    assert found == AUDITED


def test_every_audited_module_is_named_in_the_policy():
    if not POLICY.is_file():
        pytest.skip("installed without its source")
    text = POLICY.read_text(encoding="utf-8")
    for modules in AUDITED.values():
        for module in modules:
            assert f"`src/ratp/{module}`" in text, module


def test_every_test_that_the_policy_names_exists():
    if not POLICY.is_file():
        pytest.skip("installed without its source")
    tests = re.findall(r"`((?:tests/[\w/]+\.py)?(?:::)?\w*[Tt]est\w*)`", POLICY.read_text(encoding="utf-8"))
    assert len(tests) > 30
    file = ""
    for test in tests:
        path, _, name = test.rpartition("::") if "::" in test else (test, "", "") if "/" in test else ("", "", test)
        file = path or file
        code = (POLICY.parent / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in code or f"class {name}:" in code, test


def test_the_one_reader_of_pickles_takes_tensors_only():
    (module,) = AUDITED["unpickling"]
    (load,) = [call for call in calls_of(module) if ast.unparse(call.func) == "torch.load"]
    assert "weights_only=True" in [ast.unparse(keyword) for keyword in load.keywords]


@pytest.mark.parametrize("module", sorted(AUDITED["starting a process"]))
def test_processes_are_this_python_and_no_shell(module):
    """Or NVIDIA's control program, as it is found on the path."""
    starts = [call for call in calls_of(module) if ast.unparse(call.func).startswith("subprocess.")]
    assert starts
    programs = {"sys.executable", "control"} if module == "executors/mps.py" else {"sys.executable"}
    for start in starts:
        assert ast.unparse(start.func) in ("subprocess.Popen", "subprocess.run")
        assert isinstance(start.args[0], ast.List)
        assert ast.unparse(start.args[0].elts[0]) in programs


BAD = {
    "import pickle": "unpickling",
    "from pickle import loads": "unpickling",
    "import os, marshal as m": "unpickling",
    "def f():\n    import dill": "unpickling",
    "import torch\ntorch.load('x')": "unpickling",
    "import torch\ntorch.load('x', weights_only=True)": "unpickling",
    "import torch as t\nt.load('x')": "unpickling",
    "from torch import load\nload('x')": "unpickling",
    "from torch import load as read\nread('x')": "unpickling",
    "import torch.jit\ntorch.jit.load('x')": "unpickling",
    "import numpy as np\nnp.load('x')": "unpickling",
    "import numpy as np\nnp.load('x', allow_pickle=True)": "unpickling",
    "import numpy as np\nnp.load('x', allow_pickle=flag)": "unpickling",
    "eval('1')": "evaluating text",
    "exec(text)": "evaluating text",
    "compile(text, 'f', 'exec')": "evaluating text",
    "import builtins\nbuiltins.eval('1')": "evaluating text",
    "__import__(name)": "importing by name",
    "import importlib\nimportlib.import_module(name)": "importing by name",
    "from importlib import import_module\nimport_module(f'a.{b}')": "importing by name",
    "import importlib.util as u\nu.spec_from_file_location('a', 'b')": "running a file",
    "spec.loader.exec_module(module)": "running a file",
    "import runpy": "running a file",
    "import os\nos.system('ls')": "starting a process",
    "from os import popen as p\np('ls')": "starting a process",
    "import os\nos.execv('a', [])": "starting a process",
    "import subprocess": "starting a process",
    "run(['ls'], shell=True)": "starting a shell",
    "run(['ls'], shell=flag)": "starting a shell",
    "archive.extractall(folder)": "unpacking an archive",
    "zipfile.ZipFile(x).extract('a')": "unpacking an archive",
    "from shutil import unpack_archive\nunpack_archive('x')": "unpacking an archive",
    "import yaml\nyaml.load(x)": "loading YAML",
    "import ctypes": "reaching into memory",
}


@pytest.mark.parametrize("snippet", BAD)
def test_walker_finds_dangers(snippet):
    assert dangers(snippet) == {BAD[snippet]}


@pytest.mark.parametrize(
    "snippet",
    [
        "network.eval()",
        "import re\nre.compile('x')",
        "import json\njson.loads('1')",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "from importlib import import_module\nimport_module('h5py')",
        "load('x')",
        "run(['ls'], shell=False)",
        "'pickle, eval and exec in a text'",
    ],
)
def test_walker_reports_nothing_else(snippet):
    assert dangers(snippet) == set()


@pytest.mark.parametrize(
    "name",
    ["../x.json", "..", ".", "", "/tmp/x.json", "a/b.json", "a\\b.json", ".lock", ".x.json", "run.py", "x", "x.json\0"],
)
@pytest.mark.parametrize("data", [b"mine", None])
def test_a_worker_writes_nothing_but_files_of_a_run(name, data, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").write_bytes(b"held")
    with pytest.raises(RatpError, match="does not belong in a run directory"):
        write_files(folder, {name: data})
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".lock", "run"]


def test_a_worker_cannot_write_through_a_link(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "outside").write_bytes(b"yours")
    (folder / "matrix.json").symlink_to(tmp_path / "outside")
    write_files(folder, {"matrix.json": b"mine", "predictions-größe-1.csv": b"a,b"})
    assert (tmp_path / "outside").read_bytes() == b"yours"
    assert (folder / "matrix.json").read_bytes() == b"mine"
