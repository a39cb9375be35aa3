"""The built-in streams by name: their domains and orders. Reading this needs no torch.

Every order of the paper has a name: ``default`` is the first main order, ``reverse`` the second where there is one,
``1`` to ``10`` are the ten orders of its appendix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FOLDERS = "folders"
"""Name of the stream that a run builds from ``--source`` and ``--targets``."""


@dataclass(frozen=True)
class StreamInfo:
    """What a stream consists of."""

    name: str  # as written on the command line
    title: str  # one line about it
    domains: Mapping[str, str]  # codes of its domains, each with a description
    # orders by name; the one called ``default`` is used unless another is requested
    orders: Mapping[str, tuple[str, ...]]


def _orders(default: str, reverse: str | None, ten: str = "") -> dict[str, tuple[str, ...]]:
    named = {"default": default} | ({"reverse": reverse} if reverse else {})
    named |= {str(number): order for number, order in enumerate(ten.split(), start=1)}
    return {name: tuple(order.split(">")) for name, order in named.items()}


_BUILT_IN = (
    StreamInfo(
        name="demo",
        title="Embedded digits, 32×32: real scans, then photographs, fonts and street numbers",
        domains={
            "scan": "handwritten digits from a scanner, white on black",
            "photo": "the handwriting blended into photographs",
            "font": "printed digits in random colours, turned and blurred",
            "street": "house numbers on walls and plates, badly lit and badly photographed",
        },
        orders=_orders("scan>photo>font>street", "street>font>photo>scan"),
    ),
    StreamInfo(
        name="digits",
        title="Digits, 32×32: MNIST, MNIST-M, SVHN, SYN, USPS",
        domains={
            "MT": "MNIST, handwriting",
            "MM": "MNIST-M, handwriting blended into photographs",
            "SN": "SVHN, house numbers",
            "SD": "SYN, rendered digits",
            "US": "USPS, handwriting on envelopes",
        },
        orders=_orders(
            "MT>MM>SN>SD>US",
            "US>SD>SN>MM>MT",
            "SN>MT>MM>SD>US SN>SD>MT>US>MM MM>US>MT>SD>SN MT>MM>SN>SD>US MT>MM>US>SN>SD "
            "SD>MM>SN>MT>US SD>SN>US>MM>MT SD>US>MM>SN>MT US>MT>SN>MM>SD US>SD>SN>MM>MT",
        ),
    ),
    StreamInfo(
        name="pacs",
        title="PACS, 224×224: seven classes as photographs, paintings, cartoons, sketches",
        domains={"P": "photographs", "A": "art paintings", "C": "cartoons", "S": "sketches"},
        orders=_orders(
            "P>A>C>S",
            "S>C>A>P",
            "A>C>P>S A>C>S>P A>P>C>S C>A>S>P C>S>P>A P>A>C>S P>S>A>C P>S>C>A S>C>A>P S>P>C>A",
        ),
    ),
    StreamInfo(
        name="domainnet10",
        title="DomainNet, 224×224: ten classes in six domains",
        domains={
            "Qu": "quickdraw, drawn in seconds",
            "Cl": "clipart",
            "Pa": "paintings",
            "In": "infographics",
            "Sk": "sketches",
            "Re": "real photographs",
        },
        orders=_orders(
            "Qu>Sk>Cl>In>Pa>Re",
            None,
            "Re>Pa>In>Cl>Sk>Qu Cl>In>Pa>Qu>Re>Sk Cl>Re>In>Qu>Sk>Pa In>Qu>Cl>Pa>Re>Sk Pa>Sk>Qu>In>Re>Cl "
            "Qu>Re>Cl>Pa>In>Sk Qu>Sk>Cl>In>Pa>Re Sk>In>Pa>Cl>Re>Qu Sk>Re>Pa>Cl>Qu>In Sk>Re>Qu>Pa>In>Cl",
        ),
    ),
)
STREAMS = {stream.name: stream for stream in _BUILT_IN}
