"""Who may know whom: the imports of the package, read from its source, and what a user meets at its door."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import ratp
import ratp.errors

ROOT = Path(ratp.__file__).parent
FILES = {
    ".".join(("ratp", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


@cache
def tree(module):
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


@cache
def imported(module):
    """Every module a module imports, wherever in it: ``from a import b`` counts as ``a.b`` where that is one."""
    found = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in FILES else node.module)
    return found


def own(module):
    return {name for name in imported(module) if name.split(".")[0] == "ratp"}


def foreign(module):
    return {name.split(".")[0] for name in imported(module)} - {"ratp"}


def within(package):
    return [module for module in FILES if module == package or module.startswith(f"{package}.")]


def test_the_reader_of_imports_reads_them():
    """The other tests would pass on a package it saw nothing of."""
    assert {"ratp.plan", "ratp.run", "ratp.parts.pca", "ratp.cli.main", "ratp.report.page"} <= FILES.keys()
    assert own("ratp.parts.pca") == {"ratp.config", "ratp.parts.scores"}
    assert {"ratp.cli.doctor", "ratp.cli.lists", "ratp.errors"} <= own("ratp.cli.main")
    assert "ratp.report.page" in own("ratp.cli.reports")
    assert {"torch", "dataclasses"} <= foreign("ratp.parts.pca")


@pytest.mark.parametrize("module", within("ratp.parts"))
def test_parts_know_tensors_only(module):
    assert foreign(module) <= {"torch", *sys.stdlib_module_names}
    below = {"ratp.config", "ratp.errors", "ratp.together", *within("ratp.kernels")}
    assert {name for name in own(module) if not name.startswith("ratp.parts")} <= below


@pytest.mark.parametrize("module", within("ratp.kernels"))
def test_kernels_know_tensors_only(module):
    assert foreign(module) <= {"torch", "triton", *sys.stdlib_module_names}
    assert own(module) <= {*within("ratp.kernels"), "ratp.notes", "ratp.parts.randmix_draw", "ratp.parts.style_draw"}


@pytest.mark.parametrize("module", [m for m in FILES if not m.startswith("ratp.kernels.")])
def test_nothing_else_needs_triton(module):
    assert "triton" not in foreign(module)


@pytest.mark.parametrize("module", [m for m in FILES if m != "ratp.on_ray"])
def test_only_one_module_needs_ray(module):
    assert "ray" not in foreign(module)


@pytest.mark.parametrize("module", within("ratp.data"))
def test_data_knows_nothing_of_methods_and_runs(module):
    names = ("method", "methods", "phase", "run", "request", "plan", "report", "cli", "stream")
    above = tuple(f"ratp.{name}" for name in names)
    assert not {name for name in own(module) if name in above or name.startswith(tuple(f"{a}." for a in above))}


@pytest.mark.parametrize("module", [m for m in within("ratp.methods") if m != "ratp.methods"])
def test_a_method_never_imports_another(module):
    assert not {name for name in own(module) if name.startswith("ratp.methods")}


@pytest.mark.parametrize("module", [m for m in within("ratp.methods") if m != "ratp.methods"])
def test_a_method_knows_neither_runs_nor_streams_nor_evaluation(module):
    names = ("run", "request", "plan", "stream", "evaluate", "record", "matrix", "files")
    above = {f"ratp.{name}" for name in names}
    assert not own(module) & above
    assert not {name for name in own(module) if name.startswith(("ratp.data", "ratp.report", "ratp.cli"))}


@pytest.mark.parametrize("module", within("ratp.report"))
def test_a_report_reads_files_only(module):
    names = ("errors", "files", "matrix", "notes", "record", "schema", "statistics", "study_record")
    below = {f"ratp.{name}" for name in names}
    assert {name for name in own(module) if not name.startswith("ratp.report")} <= below


@pytest.mark.parametrize("module", [m for m in FILES if not m.startswith("ratp.cli") and m != "ratp.__main__"])
def test_nothing_but_the_command_line_knows_the_command_line(module):
    assert not {name for name in own(module) if name.startswith("ratp.cli")}
    assert not foreign(module) & {"typer", "click"}


def test_only_what_measures_reads_test_sets():
    """``Stream.tests`` holds the labels of targets."""
    readers = {
        module
        for module in FILES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Attribute) and node.attr == "tests"
    }
    assert readers == {"ratp.measures", "ratp.stream"}


def test_only_the_run_reads_the_answers_of_oracles():
    """``Stream.answers`` holds the labels of targets."""
    readers = {
        module
        for module in FILES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Attribute) and node.attr == "answers"
    }
    assert readers == {"ratp.attempts", "ratp.run"}


def test_there_are_no_circles():
    """A module can be read before whatever imports it."""
    seen, under_way = set(), []

    def visit(module):
        assert module not in under_way, " → ".join([*under_way, module])
        if module in seen:
            return
        under_way.append(module)
        for name in sorted(own(module) & FILES.keys()):
            visit(name)
        under_way.pop()
        seen.add(module)

    for module in FILES:
        if module != "ratp":
            visit(module)


@pytest.mark.parametrize("module", FILES)
def test_nothing_is_pickled(module):
    assert not foreign(module) & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("torch.save", "np.save", "numpy.save")
            if called == "torch.load":  # the explicit import of a user's checkpoint, for its tensors alone
                assert module == "ratp.checkpoint"
                assert "weights_only=True" in [ast.unparse(keyword) for keyword in node.keywords]
            if called in ("np.load", "numpy.load"):
                assert "allow_pickle=False" in [ast.unparse(keyword) for keyword in node.keywords]


@pytest.mark.parametrize("module", [m for m in FILES if not m.startswith("ratp.cli")])
def test_only_the_command_line_prints(module):
    calls = [node.func for node in ast.walk(tree(module)) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Name) and call.id in ("print", "input")]
    assert not [node for node in ast.walk(tree(module)) if ast.unparse(node) == "sys.stdout"]


@pytest.mark.parametrize("module", FILES)
def test_no_environment_is_written_and_no_device_assumed(module):
    text = FILES[module].read_text(encoding="utf-8")
    assert ".cuda()" not in text
    assert "set_default_device" not in text
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Assign | ast.Delete):
            assert not [
                t for t in node.targets if isinstance(t, ast.Subscript) and ast.unparse(t.value) == "os.environ"
            ]
        elif isinstance(node, ast.Call) and module != "ratp":  # which tells waiting threads to sleep
            written = ("setdefault", "update", "pop", "clear")
            assert ast.unparse(node.func) not in {"os.putenv", *(f"os.environ.{name}" for name in written)}


@pytest.mark.parametrize("module", FILES)
def test_every_module_says_what_it_is_for(module):
    assert ast.get_docstring(tree(module))


LAZY = ("torchvision", "timm", "matplotlib", "sklearn", "PIL", "typer", "rich", "jinja2", "ray")


def test_importing_the_package_stays_quick():
    """Nothing a library user may not need is imported; torch is, and may bring what it likes by itself."""
    script = f"""
import sys, torch
before = set(sys.modules)
import ratp
print(sorted(name for name in {LAZY!r} if name in set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("before", "given", "found"),
    [
        ("", {}, "1000"),
        ("", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("", {"OMP_WAIT_POLICY": "active"}, "None"),
        ("import torch; ", {}, "None"),
    ],
)
def test_waiting_threads_sleep_unless_the_user_says_otherwise(before, given, found):
    """The OpenMP library reads it when torch loads it, and a process that is started here gets it too."""
    inner = "import os; print(os.environ.get('GOMP_SPINCOUNT'))"
    script = f"{before}import ratp, subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"{found}\n"


def test_the_command_can_begin_before_torch_is_there():
    """Or Ctrl-C in the first seconds would end in a traceback."""
    script = "import sys, ratp.__main__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\n", "")


class TestPublic:
    def test_there_are_about_two_dozen_names(self):
        assert 20 <= len(ratp.__all__) <= 28
        assert len(set(ratp.__all__)) == len(ratp.__all__)
        assert sorted(ratp.__all__) == ratp.__all__

    def test_what_it_raises_and_returns_is_among_them(self):
        errors = {
            name for name, item in vars(ratp.errors).items() if inspect.isclass(item) and issubclass(item, Exception)
        }
        returned = {inspect.signature(f).return_annotation for f in (ratp.resolve, ratp.read_run, ratp.Run.execute)}
        assert errors | returned <= {*ratp.__all__}

    @pytest.mark.parametrize("name", [n for n in ratp.__all__ if n != "__version__"])
    def test_each_exists_and_is_documented(self, name):
        item = getattr(ratp, name)
        assert inspect.isclass(item) or inspect.isfunction(item)
        assert item.__name__ == name
        doc = inspect.getdoc(item)
        assert doc
        assert not doc.startswith(f"{name}("), "a dataclass without a docstring shows its signature"

    def test_no_other_name_exists(self):
        assert set(ratp.__all__) <= set(dir(ratp))
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
            _ = ratp.nonsense

    def test_the_version_is_the_packages(self):
        from importlib.metadata import version

        assert ratp.__version__ == version("ratp")

    @pytest.mark.parametrize("name", [n for n in ratp.__all__ if inspect.isclass(getattr(ratp, n))])
    def test_what_a_class_offers_is_documented(self, name):
        for attribute, item in vars(getattr(ratp, name)).items():
            function = item.fget if isinstance(item, property) else getattr(item, "__func__", item)
            if inspect.isfunction(function) and not attribute.startswith("_"):
                assert inspect.getdoc(function), f"{name}.{attribute}"

    def test_its_types_travel_with_it(self):
        """The wheel takes ``py.typed`` and the page's template along."""
        import tomllib

        assert (ROOT / "py.typed").is_file()
        assert (ROOT / "report" / "page.html").is_file()
        project = ROOT.parents[1] / "pyproject.toml"
        if not project.is_file():
            pytest.skip("installed without its source")
        data = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]["ratp"]
        assert {"py.typed", "report/*.html"} <= set(data)

    def test_it_runs_as_a_module(self):
        assert importlib.util.find_spec("ratp.__main__") is not None
        assert own("ratp.__main__") == {"ratp.cli.main"}
