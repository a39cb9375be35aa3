"""Which room may import which, read from the source, and what a user meets at the package's door."""

from __future__ import annotations

import ast
import inspect
import os
import re
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

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
# What each room may import, besides itself, `errors` and `config`: rooms, or single modules.
TENSORS = {"_core", "data", "functional", "networks", "training"}
RUN = {*TENSORS, "methods", "streams", "evaluation", "guard"}
ROOMS = {
    "errors": set(),
    "config": set(),
    "_core": set(),
    "data": {"_core"},
    "functional": {"_core.environment", "_core.state"},
    "networks": {"_core", "data", "functional"},
    "training": TENSORS - {"training"},
    "methods": TENSORS,
    "streams": TENSORS,
    "evaluation": TENSORS | {"streams"},
    "guard": TENSORS,
    "runs": RUN,
    "executors": RUN | {"runs"},
    "studies": RUN | {"runs", "executors"},
    "deploy": RUN | {"runs"},
    "reports": {
        "_core",
        "evaluation.details",
        "evaluation.matrix",
        "evaluation.online",
        "runs.record",
        "studies.record",
    },
    "cli": RUN | {"runs", "executors", "studies", "deploy", "reports"},
    "api": RUN | {"runs", "cli.console", "cli.progress"},
    "__main__": {"cli"},
}

# The only modules, or rooms, that import these libraries.
LIBRARIES = {
    "triton": {"functional.kernels"},
    "ray": {"executors.ray"},
    "typer": {"cli"},
    "click": {"cli"},
    "rich": {"cli", "reports"},
    "jinja2": {"reports", "deploy.page"},
    "fastapi": {"deploy.serve"},
    "starlette": {"deploy.serve"},
    "uvicorn": {"deploy.serve"},
    "onnx": {"deploy.onnx_file"},
    "onnxruntime": {"deploy.onnx_file"},
    "mlflow": {"runs.track"},
    "wandb": {"runs.track"},
    "trackio": {"runs.track"},
    "timm": set(),  # by name, in a function: see networks.backbones
}
MODULES_OF_A_RUN = 49
PICKLES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


@cache
def tree(module):
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


@cache
def imports_of(module):
    """Every module that a module imports, anywhere in it: ``from a import b`` counts as ``a.b`` if that is a module."""
    found = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in FILES else node.module for name in names}
    return found


def for_types(module):
    """What a module imports for type checkers alone."""
    blocks = [n for n in tree(module).body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    nodes = [node for block in blocks for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    return {node.module for node in nodes} - {n.module for n in tree(module).body if isinstance(n, ast.ImportFrom)}


def inside(module):
    """Imports from the package, without its name in front; the package itself is left out."""
    return {name.removeprefix("ratp.") for name in imports_of(module) if name.startswith("ratp.")}


def outside(module):
    return {name.partition(".")[0] for name in imports_of(module)} - {"ratp"}


def is_within(module, places):
    return any(module == place or module.startswith(f"{place}.") for place in places)


def calls(module):
    return [node for node in ast.walk(tree(module)) if isinstance(node, ast.Call)]


def test_imports_are_found():
    """The other tests would pass on a package whose imports they cannot see."""
    assert {"ratp.runs.plan", "ratp.functional.losses", "ratp.cli.main", "ratp.methods"} <= FILES.keys()
    assert "functional.losses" in inside("ratp.methods.ratp")
    assert {"torch", "dataclasses"} <= outside("ratp.functional.losses")


def test_rooms_import_downwards_only():
    wrong = []
    for module in FILES.keys() - {"ratp"}:
        name = module.removeprefix("ratp.")
        room = name.partition(".")[0]
        allowed = {room, "errors", "config", *ROOMS[room]}
        wrong += [f"{name} imports {other}" for other in sorted(inside(module)) if not is_within(other, allowed)]
    assert not wrong


def test_methods_do_not_import_one_another():
    """Each stands alone; what several use is in ``methods.shared``, and only the package lists them all."""
    wrong = []
    for module in FILES:
        if module.startswith("ratp.methods."):
            others = {name for name in inside(module) if is_within(name, {"methods"})}
            wrong += [f"{module} imports {name}" for name in others if not is_within(name, {"methods.shared"})]
    assert not wrong


def test_methods_know_images_by_their_domain_only():
    for module in FILES:
        if module.startswith("ratp.methods."):
            assert {name for name in inside(module) if is_within(name, {"data"})} <= {"data.domain"}, module


def test_no_module_imports_itself_through_others():
    finished, under_way = set(), []

    def visit(module):
        assert module not in under_way, " → ".join([*under_way, module])
        if module in finished:
            return
        under_way.append(module)
        for name in sorted((imports_of(module) - for_types(module)) & FILES.keys() - {"ratp", module}):
            visit(name)
        finished.add(under_way.pop())

    for module in FILES.keys() - {"ratp"}:
        visit(module)


def test_libraries_stay_in_their_rooms():
    wrong = []
    for module in FILES:
        for library, places in LIBRARIES.items():
            if library in outside(module) and not is_within(module.removeprefix("ratp."), places):
                wrong.append(f"{module} imports {library}")
    assert not wrong


def test_mathematics_needs_torch_alone():
    for module in FILES:
        if module.startswith("ratp.functional"):
            assert outside(module) <= {"torch", "triton", *sys.stdlib_module_names}, module


def test_only_the_evaluation_reads_test_sets_and_only_the_run_the_answers_of_oracles():
    """``Stream.tests`` and ``Stream.answers`` hold the labels of targets."""

    def readers(attribute):
        return {
            module.removeprefix("ratp.")
            for module in FILES
            for node in ast.walk(tree(module))
            if isinstance(node, ast.Attribute) and node.attr == attribute
        }

    assert readers("tests") == {"evaluation.accuracy", "streams.stream"}
    assert readers("answers") == {"runs.estimate", "runs.stage_runner"}  # an estimate throws its method away


def test_nothing_is_pickled():
    for module in FILES:
        assert not outside(module) & PICKLES, module
        for call in calls(module):
            called, options = ast.unparse(call.func), [ast.unparse(keyword) for keyword in call.keywords]
            assert called not in ("torch.save", "np.save", "numpy.save"), module
            if called == "torch.load":  # the explicit import of a user's checkpoint, for its tensors alone
                assert module == "ratp.networks.torch_checkpoint"
                assert "weights_only=True" in options
            if called in ("np.load", "numpy.load"):
                assert "allow_pickle=False" in options, module


def test_only_the_command_line_prints():
    for module in FILES:
        if not module.startswith("ratp.cli"):
            assert not [call for call in calls(module) if ast.unparse(call.func) in ("print", "input")], module
            assert not [node for node in ast.walk(tree(module)) if ast.unparse(node) == "sys.stdout"], module


def test_no_module_writes_the_environment_or_assumes_a_device():
    for module in FILES:
        text = FILES[module].read_text(encoding="utf-8")
        assert ".cuda()" not in text and "set_default_device" not in text, module
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Assign | ast.Delete):
                places = [ast.unparse(target.value) for target in node.targets if isinstance(target, ast.Subscript)]
                assert "os.environ" not in places, module
            elif isinstance(node, ast.Call) and module != "ratp":  # which makes waiting threads sleep
                written = ("setdefault", "update", "pop", "clear")
                assert ast.unparse(node.func) not in {"os.putenv", *(f"os.environ.{name}" for name in written)}, module


@pytest.mark.slow
def test_a_run_touches_few_modules(tmp_path):
    """Who follows ``ratp run demo`` through the code reads at most so many files; the number only ever falls."""
    tool = ROOT.parents[1] / "tools" / "walk.py"
    for run in ("draws the images", "finds them in the cache"):
        words = ["run", "demo", "--set", "epochs=1", "--set", "steps=1", "--quiet", "--out", str(tmp_path / run)]
        walk = [sys.executable, str(tool), *words]
        done = subprocess.run(walk, capture_output=True, text=True, check=True, timeout=600)
    modules = int(done.stdout.splitlines()[-1].partition(" modules")[0])
    assert modules <= MODULES_OF_A_RUN


class TestRooms:
    def test_a_newcomer_sees_about_twenty_names(self):
        names = [path.name for path in ROOT.iterdir() if path.name != "__pycache__"]
        assert len(names) <= 21, sorted(names)
        assert {Path(name).stem for name in names} == {*ROOMS, "__init__", "py"}

    def test_every_module_says_what_it_is_for(self):
        assert not [module for module in FILES if not ast.get_docstring(tree(module))]

    def test_every_room_says_what_it_may_import(self):
        for room in ROOMS:
            if (ROOT / room).is_dir():
                assert "import" in ast.get_docstring(tree(f"ratp.{room}")).lower(), room


def test_importing_the_package_stays_quick():
    """Without torch, or Ctrl-C in the first seconds would end in a traceback; no name needs what reports do."""
    script = """
import sys, ratp, ratp.__main__
unwanted = [name for name in ("torch", "numpy", "typer") if name in sys.modules]
assert [getattr(ratp, name) for name in ratp.__all__]
print(unwanted + [name for name in ("timm", "matplotlib", "sklearn", "typer", "jinja2", "ray") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("before", "given", "found"),
    [
        ("", {}, "1000"),
        ("", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("", {"OMP_WAIT_POLICY": "active"}, "None"),
        ("import types; sys.modules['torch'] = types.ModuleType('torch'); ", {}, "None"),
    ],
)
def test_waiting_threads_sleep_unless_the_user_says_otherwise(before, given, found):
    """The OpenMP library reads it when torch loads it, and a process that is started here inherits it."""
    script = f"import os, sys; {before}import ratp; print(os.environ.get('GOMP_SPINCOUNT'))"
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"{found}\n"


@pytest.mark.parametrize(("platform", "found"), [("darwin", "1"), ("linux", "None")])
def test_a_mac_computes_on_the_processor_what_its_gpu_cannot(platform, found):
    script = f"import os, sys; sys.platform = {platform!r}; import ratp; print(os.environ.get('{FALLBACK}'))"
    environment = {name: value for name, value in os.environ.items() if name != FALLBACK}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == found


class TestPublic:
    def test_names_are_sorted_and_few(self):
        assert sorted({*ratp.__all__}) == ratp.__all__
        assert len(ratp.__all__) <= 48

    def test_what_it_raises_and_returns_is_among_them(self):
        errors = {
            name
            for name, item in vars(ratp.errors).items()
            if inspect.isclass(item) and issubclass(item, ratp.RatpError)
        }
        returned = {inspect.signature(f).return_annotation for f in (ratp.resolve, ratp.read_run, ratp.Run.execute)}
        assert errors | returned <= {*ratp.__all__}

    def test_each_exists_and_is_documented(self):
        for name in {*ratp.__all__} - {"__version__"}:
            item = getattr(ratp, name)
            assert inspect.isclass(item) or inspect.isfunction(item)
            assert item.__name__ == name
            doc = inspect.getdoc(item)
            assert doc and not doc.startswith(f"{name}("), (
                f"{name}: a dataclass without a docstring shows its signature"
            )
            for attribute, member in vars(item).items() if inspect.isclass(item) else ():
                function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                if inspect.isfunction(function) and not attribute.startswith("_"):
                    assert inspect.getdoc(function), f"{name}.{attribute}"

    def test_type_checkers_see_the_same_names(self):
        (block,) = [
            node for node in tree("ratp").body if isinstance(node, ast.If) and "TYPE" in ast.unparse(node.test)
        ][:1]
        seen = {alias.asname: node.module for node in block.body for alias in node.names}
        assert seen == {name: f"ratp.{module}" for name, module in ratp._MODULES.items()}

    def test_what_the_example_needs_is_among_them(self):
        """A method can be written from ``ratp`` alone."""
        example = (ROOT.parents[1] / "examples" / "self_training.py").read_text(encoding="utf-8")
        assert not re.findall(r"^from ratp\.", example, flags=re.M)

    def test_no_other_name_exists(self):
        assert set(ratp.__all__) <= set(dir(ratp))
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
            _ = ratp.nonsense
