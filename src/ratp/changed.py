"""What of a run is not as usual, by today's defaults.

A config names the switches and sizes that differed from the defaults of its time. Where a default has changed since,
that misleads: a run would be told by a value that all have now, or pass for what its name now stands for.
"""

from __future__ import annotations

from dataclasses import replace

from ratp.errors import ConfigError
from ratp.methods import METHODS
from ratp.plan import NO_WEIGHTS, resolve
from ratp.record import RunRecord
from ratp.request import RunRequest
from ratp.streams import STREAMS


def by_now(record: RunRecord) -> RunRecord:
    """The run with what differs from today's defaults as its changes.

    It stays as it is if its method or stream is no part of this package, or if it has switches that are not there now.
    """
    config = record.config
    method, stream = record.method, config["stream"]
    if method not in METHODS or stream not in STREAMS or config.get("method_file") is not None:
        return record
    try:
        values = {**config["recipe"], **config["switches"]}
        request = RunRequest(
            stream, method, preset=config["preset"], changes=values, device="cpu", weights=NO_WEIGHTS, precision="fp32"
        )
        return replace(record, differing=resolve(request).changed)
    except (ConfigError, KeyError, TypeError):
        return record
