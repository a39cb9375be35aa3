"""Where published data sets can be had: addresses, sizes, hashes, and the way by hand where no address is reliable.

This is the only module that knows addresses. A hash stands here only where public catalogues agree on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ratp.errors import RatpError, unknown

Part = Literal["train", "test", "all"]

DIGITS = tuple("0123456789")
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
DOMAINNET_10 = ("dog", "golf_club", "shoe", "snowman", "spreadsheet", "squirrel", "table", "tiger", "tree", "whale")


@dataclass(frozen=True)
class SourceFile:
    """A file on the web.

    Attributes:
        name: What to call it here.
        urls: Its addresses, best first.
        size: Number of bytes, if known.
        sha256: Its hash, if known.
        part: Which part of the domain is in it.
        images: Number of images in it; 0 for labels and lists, None if not known.
    """

    name: str
    urls: tuple[str, ...]
    size: int | None = None
    sha256: str | None = None
    part: Part = "all"
    images: int | None = None


@dataclass(frozen=True)
class DomainSource:
    """Where a domain comes from.

    Attributes:
        name: Of the domain.
        files: What to download; empty if there is no reliable address.
        parts: Which parts of it make up the domain in the benchmark streams.
        manual: How to get it by hand.
        rebuilds: Whether it can be rebuilt after its published recipe.
        published: Number of images the benchmark was published with, where files do not say.
        terms: What its authors allow, where they restrict it.
    """

    name: str
    files: tuple[SourceFile, ...] = ()
    parts: tuple[Part, ...] = ("all",)
    manual: str = ""
    rebuilds: bool = False
    published: int | None = None
    terms: str = ""

    def chosen(self) -> tuple[SourceFile, ...]:
        """The files of the parts that make up the domain."""
        return tuple(file for file in self.files if file.part in self.parts)

    def images(self) -> int | None:
        """How many images those files hold, if that is known."""
        counts = [file.images for file in self.chosen()]
        return None if not counts or None in counts else sum(count for count in counts if count)


@dataclass(frozen=True)
class DataSet:
    """A published data set.

    Attributes:
        name: As written on the command line; also the folder of its domains.
        title: A line on what it is.
        classes: Its classes, or those of them that the benchmark uses.
        is_selection: Whether ``classes`` are only some of those published.
        domains: Its domains by name.
    """

    name: str
    title: str
    classes: tuple[str, ...]
    domains: Mapping[str, DomainSource]
    is_selection: bool = False

    def domain(self, name: str) -> DomainSource:
        """The source of a domain.

        Raises:
            RatpError: If the data set has no such domain.
        """
        if name not in self.domains:
            raise RatpError(unknown(f"domain of {self.name}", name, self.domains))
        return self.domains[name]


def data_set(name: str) -> DataSet:
    """A data set of the catalogue.

    Raises:
        RatpError: If there is none of that name.
    """
    if name not in CATALOGUE:
        raise RatpError(unknown("data set", name, CATALOGUE))
    return CATALOGUE[name]


def _by_hand(domain: str, what: str, where: str, given: str) -> str:
    return f"By hand: download {what} from {where}, then: ratp data import {domain} {given} --data FOLDER"


def _by_name(*sources: DomainSource) -> dict[str, DomainSource]:
    return {source.name: source for source in sources}


# --- digits

_MNIST_MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
_SVHN = "http://ufldl.stanford.edu/housenumbers/"
_USPS = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"


def _mnist(name: str, size: int, sha256: str, part: Part, images: int) -> SourceFile:
    return SourceFile(name, tuple(mirror + name for mirror in _MNIST_MIRRORS), size, sha256, part, images)


_DIGITS = DataSet(
    "digits",
    "handwritten, printed and photographed digits in five domains",
    DIGITS,
    _by_name(
        DomainSource(
            "mnist",
            (
                _mnist(
                    "train-images-idx3-ubyte.gz",
                    9_912_422,
                    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                    "train",
                    60_000,
                ),
                _mnist(
                    "train-labels-idx1-ubyte.gz",
                    28_881,
                    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                    "train",
                    0,
                ),
                _mnist(
                    "t10k-images-idx3-ubyte.gz",
                    1_648_877,
                    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                    "test",
                    10_000,
                ),
                _mnist(
                    "t10k-labels-idx1-ubyte.gz",
                    4_542,
                    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                    "test",
                    0,
                ),
            ),
            ("train",),
            _by_hand("mnist", "the idx files of MNIST", _MNIST_MIRRORS[0], "train-images-… train-labels-…"),
        ),
        DomainSource(
            "mnist_m",
            manual=_by_hand(
                "mnist_m",
                "and unpack mnist_m.tar.gz (a browser is needed)",
                "https://drive.google.com/drive/folders/0B_tExHiYS-0vR2dNZEU4NGlSSW8",
                "mnist_m/mnist_m_train mnist_m/mnist_m_train_labels.txt",
            )
            + "\nOr rebuild it from MNIST after the published recipe: ratp data rebuild mnist_m --data FOLDER",
            rebuilds=True,
            published=59_001,
        ),
        DomainSource(
            "svhn",
            (
                SourceFile(
                    "train_32x32.mat",
                    (_SVHN + "train_32x32.mat",),
                    182_040_794,
                    "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
                    "train",
                    73_257,
                ),
                SourceFile(
                    "test_32x32.mat",
                    (_SVHN + "test_32x32.mat",),
                    64_275_384,
                    "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
                    "test",
                    26_032,
                ),
            ),
            ("train",),
            _by_hand("svhn", "train_32x32.mat (format 2)", _SVHN, "train_32x32.mat"),
            terms="for non-commercial use only",
        ),
        DomainSource(
            "syn",
            manual=_by_hand(
                "syn",
                "and unpack SynthDigits.zip (a browser is needed)",
                "https://drive.google.com/file/d/0B9Z4d7lAwbnTSVR1dEFSRUFxOUU/view",
                "synth_train_32x32.mat",
            )
            + "\nOr rebuild it after the published recipe: ratp data rebuild syn --data FOLDER",
            rebuilds=True,
        ),
        DomainSource(
            "usps",
            (
                SourceFile(
                    "usps.bz2",
                    (_USPS + "usps.bz2",),
                    None,
                    "3771e9dd6ba685185f89867b6e249233dd74652389f263963b3b741e994b034f",
                    "train",
                    7_291,
                ),
                SourceFile(
                    "usps.t.bz2",
                    (_USPS + "usps.t.bz2",),
                    None,
                    "a9c0164e797d60142a50604917f0baa604f326e9a689698763793fa5d12ffc4e",
                    "test",
                    2_007,
                ),
            ),
            ("train", "test"),
            _by_hand("usps", "usps.bz2 and usps.t.bz2", _USPS, "usps.bz2 usps.t.bz2"),
        ),
    ),
)

# --- PACS

_PACS_PAGE = (
    "https://drive.google.com/drive/folders/0B6x7gtvErXgfUU1WcGY5SzdwZVk?resourcekey=0-2fvpQY_QSyJf2uIECzqPuQ "
    "(linked from https://domaingeneralization.github.io/#data; a browser is needed)"
)


def _pacs(domain: str, images: int) -> DomainSource:
    manual = _by_hand(domain, "pacs_data (or PACS.zip, with its folder kfold)", _PACS_PAGE, "pacs_data.zip")
    return DomainSource(domain, manual=manual, published=images)


_PACS = DataSet(
    "pacs",
    "photographs, paintings, cartoons and sketches of seven classes",
    PACS_CLASSES,
    _by_name(_pacs("photo", 1_670), _pacs("art_painting", 2_048), _pacs("cartoon", 2_344), _pacs("sketch", 3_929)),
)

# --- DomainNet

_DOMAINNET_HOSTS = (
    "https://csr.bu.edu/ftp/visda/2019/multi-source/",
    "http://csr.bu.edu/ftp/visda/2019/multi-source/",
)
_DOMAINNET_TERMS = "for academic research, under the fair use notice of its authors"


def _bu(path: str, size: int | None = None, sha256: str | None = None, images: int | None = None) -> SourceFile:
    return SourceFile(path.split("/")[-1], tuple(host + path for host in _DOMAINNET_HOSTS), size, sha256, "all", images)


def _domainnet(
    domain: str, folder: str, published: int, archive: tuple[int, str], train: tuple[int, str], test: tuple[int, str]
) -> DomainSource:
    """A domain as cleaned by its authors, and the two lists that say which images count."""
    return DomainSource(
        domain,
        (
            _bu(f"{folder}{domain}.zip", *archive),
            _bu(f"domainnet/txt/{domain}_train.txt", *train, images=0),
            _bu(f"domainnet/txt/{domain}_test.txt", *test, images=0),
        ),
        manual=_by_hand(
            domain,
            f"{domain}.zip, {domain}_train.txt and {domain}_test.txt",
            "http://ai.bu.edu/M3SDA/",
            f"{domain}.zip {domain}_train.txt {domain}_test.txt",
        ),
        published=published,
        terms=_DOMAINNET_TERMS,
    )


def _domainnet_original(domain: str, published: int) -> DomainSource:
    manual = _by_hand(domain, f"{domain}.zip, the original version", "http://ai.bu.edu/M3SDA/", f"{domain}.zip")
    return DomainSource(domain, (_bu(f"{domain}.zip"),), manual=manual, published=published, terms=_DOMAINNET_TERMS)


_DOMAINNET = DataSet(
    "domainnet",
    "ten classes of DomainNet in six domains, as cleaned by its authors (18 GB to download for all)",
    DOMAINNET_10,
    _by_name(
        _domainnet(
            "clipart",
            "groundtruth/",
            2_067,
            (1_270_909_081, "f8f248a3e8bbc9868c523ae24e6601b4c2ad102afc60c0efeb4f3255df22354d"),
            (1_443_819, "affdadf5f95a7583e6b98030a3d35007e2613ee4dd942393c5a705ec2b429312"),
            (628_917, "62c8e36aaba1c41ad9e249099739707220a44c08f167b37ef420f34a31628a6b"),
        ),
        _domainnet(
            "infograph",
            "",
            3_349,
            (4_338_659_804, "891e14f476317e97b6f06d6498c11d0a5b8d0c8b57210765ed9beb072da611fa"),
            (1_683_098, "36b44cbd41a2915e0dc73b4f4be8862a6f3c220f93c8d63fb2439beeae3aefda"),
            (728_028, "413cfa54ac92e7e6b242f4f09fbd9c8ace85c4deaf3cb6c81ff6b68264460136"),
        ),
        _domainnet(
            "painting",
            "groundtruth/",
            4_799,
            (3_679_366_174, "fa47e6d405503ea0286cabd767f176bd30e988b63ddd7b9db16cf030c9770015"),
            (2_241_901, "f1da38d50a702fddf1329f85bc607d7a2abcae7e6aec75e1fd49cc1bd340d47b"),
            (971_888, "11472b13b5188e09f06918b12eebb660588c97a20e43e268d9b02e3e37eb8f97"),
        ),
        _domainnet(
            "quickdraw",
            "",
            5_000,
            (459_920_701, "9f37df2a8c3733703dbb35ad9964202a65f675ca30137756457537536b485d84"),
            (5_164_600, "3a5edd3bc215772010eebc87f158707703dd7e48091d13b816af81326a9d1c0f"),
            (2_213_400, "2a00a60650a453c65c356da748fec54084a197272137c440e7d52d08947357bf"),
        ),
        _domainnet(
            "real",
            "",
            5_856,
            (6_062_039_589, "d7fe010b430c5b510f85d657d38c4a1924822695fabea4fef57bd00dba251d63"),
            (4_440_944, "19d483256d24aef19e581b65eda8333fd918aef3eb733fe499ff384120e3a289"),
            (1_911_327, "2b3f75bcde309aeb5931292084b2162e936b5f189e3bb1ad716f0f74c460864c"),
        ),
        _domainnet(
            "sketch",
            "",
            4_942,
            (2_633_992_926, "23a7dbae7016b343e934399beaa8a68728fb5e570ebe2c71df9b75cf91c499fc"),
            (1_960_222, "72f4bc6afa5702a1ccba800d0053c1427de87439dfaf246dbc9a2e71abfec54f"),
            (850_581, "3fb48fca18c507c4321f007c3f62b308ec232ff6928cbfe2af64e76ec366e840"),
        ),
    ),
    is_selection=True,
)

_DOMAINNET_ORIGINAL = DataSet(
    "domainnet_original",
    "the two domains of DomainNet that were cleaned later, as they first appeared",
    DOMAINNET_10,
    _by_name(_domainnet_original("clipart", 2_067), _domainnet_original("painting", 4_799)),
    is_selection=True,
)

CATALOGUE: Mapping[str, DataSet] = {entry.name: entry for entry in (_DIGITS, _PACS, _DOMAINNET, _DOMAINNET_ORIGINAL)}
