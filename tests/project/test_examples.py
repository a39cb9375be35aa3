"""The example method is what docs/how-to/add-a-method.md promises."""

import re
from pathlib import Path

import pytest
from safetensors.torch import save_file

import ratp
from helpers import toy_domains
from ratp._core.files import read_tensors
from ratp.cli.main import app
from ratp.networks.network import Network, NetworkConfig
from ratp.streams.stream import make_stream

ROOT = Path(__file__).parents[2]
README, GUIDE = "README.md", "docs/how-to/add-a-method.md"
EXAMPLE = str(ROOT / "examples" / "self_training.py")
TINY = {"epochs": 2, "steps": 3, "network.width": 0.1, "batch": 16}


def weights(folder, probe=False, **changes):
    plan = ratp.resolve(ratp.RunRequest(method=EXAMPLE, changes=TINY | changes))
    ratp.Run(plan, folder, probe=probe).execute()
    return read_tensors(folder / "weights.safetensors")[0]


def test_a_method_file_gives_the_same_weights_twice(tmp_path):
    first, second = weights(tmp_path / "a"), weights(tmp_path / "b", probe=True)
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)


@pytest.mark.slow
def test_its_switch_decides_whether_it_learns_on_targets(tmp_path):
    eager, shy = weights(tmp_path / "a", threshold=0.0), weights(tmp_path / "b", threshold=0.999999)
    assert not all(eager[name].equal(shy[name]) for name in eager)


@pytest.mark.slow
def test_an_interrupted_method_file_ends_like_an_undisturbed_one(tmp_path):
    whole = weights(tmp_path / "whole", threshold=0.0)
    plan = ratp.resolve(ratp.RunRequest(method=EXAMPLE, changes=TINY | {"threshold": 0.0}))
    events = ratp.Run(plan, tmp_path / "cut").events()
    for _ in range(12):
        next(events)
    events.close()
    assert all(whole[name].equal(tensor) for name, tensor in weights(tmp_path / "cut", threshold=0.0).items())


def test_it_starts_from_given_weights(tmp_path):
    """And from the network that every other method starts from."""
    given = Network(NetworkConfig(width=0.1), 10).backbone.state_dict()
    save_file(given, tmp_path / "given.safetensors")
    states = []
    for method in (EXAMPLE, "source-only"):
        request = ratp.RunRequest(method=method, changes=TINY, weights=str(tmp_path / "given.safetensors"))
        states.append(ratp.resolve(request).build_method(make_stream("toy", toy_domains(), 1)).state())
    own, other = states
    assert all(own[f"network.backbone.{name}"].equal(tensor) for name, tensor in given.items())
    assert all(own[name].equal(tensor) for name, tensor in other.items() if name.startswith("network."))


def test_the_guide_quotes_the_example_as_it_is():
    guide = (ROOT / GUIDE).read_text()
    source = re.sub(r'\n    """Switches.*?"""\n', "", Path(EXAMPLE).read_text())
    quoted = re.search(r"```text\n(.*?)```", guide, flags=re.S)
    assert quoted
    assert all(line in source for line in quoted[1].splitlines())


def test_example_imports_only_public_names_and_parts():
    """What another module has may be moved."""
    modules = re.findall(r"^from (ratp[\w.]*) import", Path(EXAMPLE).read_text(), flags=re.M)
    assert all(module == "ratp" or module.startswith("ratp.functional.") for module in modules)


@pytest.mark.parametrize("document", [README, GUIDE, "docs/explanation/architecture.md", "docs/reference/methods.md"])
def test_every_documented_name_is_public(document):
    assert {*re.findall(r"\bratp\.(\w+)\(", (ROOT / document).read_text())} <= {*ratp.__all__}


@pytest.mark.parametrize("document", [README, GUIDE, "docs/explanation/paper-and-code.md"])
def test_every_documented_command_and_option_exists(document):
    import typer.main

    group = typer.main.get_command(app)
    for command in re.findall(
        r"`?ratp ((?:demo|run|report|methods|streams|doctor)\b[^`\n]*)", (ROOT / document).read_text()
    ):
        words = command.split()
        current = group.commands[words[0]]
        if len(words) > 1 and words[1] in getattr(current, "commands", {}):
            current = current.commands[words[1]]
        known = {name for parameter in current.params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, command
