"""All methods: the table of those that come along, and anyone's own file."""

from __future__ import annotations

from pathlib import Path

from ratp.errors import ConfigError, unknown
from ratp.method import Method
from ratp.methods.adabn import AdaBN
from ratp.methods.adacontrast import AdaContrast
from ratp.methods.aucid import AuCID
from ratp.methods.bmd import BMD
from ratp.methods.cotta import CoTTA
from ratp.methods.eata import EATA
from ratp.methods.efdm import EFDM
from ratp.methods.gsfda import GSFDA
from ratp.methods.l2d import L2D
from ratp.methods.oracle import Oracle
from ratp.methods.own import from_file
from ratp.methods.pcl import PCL
from ratp.methods.pden import PDEN
from ratp.methods.ratp import RaTP
from ratp.methods.shot import SHOT
from ratp.methods.shot_plus import SHOTPlus
from ratp.methods.shot_plus_plus import SHOTPlusPlus
from ratp.methods.snr import SNR
from ratp.methods.source_only import SourceOnly
from ratp.methods.t3a import T3A
from ratp.methods.tent import Tent

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        RaTP,
        SourceOnly,
        Oracle,
        SHOT,
        SHOTPlus,
        SHOTPlusPlus,
        GSFDA,
        BMD,
        AuCID,
        SNR,
        PCL,
        EFDM,
        L2D,
        PDEN,
        AdaBN,
        Tent,
        T3A,
        EATA,
        CoTTA,
        AdaContrast,
    )
}


def find_method(name: str) -> type[Method]:
    """The method called ``name``, or the one defined in the Python file ``name``.

    Raises:
        ConfigError: If there is none, with the nearest name; or if one from a file is called as one of ours.
    """
    if name in METHODS:
        return METHODS[name]
    if name.endswith(".py"):
        method = from_file(Path(name))
        if method.name in METHODS:
            raise ConfigError(f"the method in {name!r} is called {method.name!r}, as one of ratp is: rename it.")
        return method
    raise ConfigError(unknown("method", name, METHODS) + " Or give the path of a .py file that defines one.")
