"""The table of methods."""

from __future__ import annotations

from ratp.method import Method
from ratp.methods.ratp import RaTP
from ratp.methods.source_only import SourceOnly

METHODS: dict[str, type[Method]] = {method.name: method for method in (RaTP, SourceOnly)}
