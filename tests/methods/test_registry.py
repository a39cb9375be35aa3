"""The registry lists methods without loading them, and what it says of each is true."""

import subprocess
import sys

import pytest

from ratp.methods import METHODS, describe


@pytest.mark.parametrize("name", METHODS)
def test_a_description_says_what_the_class_says(name):
    method = METHODS[name]
    assert describe(name) == tuple(getattr(method, field) for field in describe(name)._fields)
    assert method.name == name


def test_listing_methods_does_not_import_torch():
    script = "import sys; from ratp.methods import METHODS, describe; list(map(describe, METHODS)); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert "ratp.methods" in done.stdout.split()
    assert "torch" not in done.stdout.split()
