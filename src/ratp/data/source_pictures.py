"""Where PACS and DomainNet can be had. A hash stands here only where public catalogues agree on it."""

from __future__ import annotations

from ratp.data.source_types import DataSet, DomainSource, SourceFile, by_hand, by_name

PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
DOMAINNET_10 = ("dog", "golf_club", "shoe", "snowman", "spreadsheet", "squirrel", "table", "tiger", "tree", "whale")

# --- PACS

_PACS_PAGE = (
    "https://drive.google.com/drive/folders/0B6x7gtvErXgfUU1WcGY5SzdwZVk?resourcekey=0-2fvpQY_QSyJf2uIECzqPuQ\n"
    "  (linked from https://domaingeneralization.github.io/#data)"
)
_PACS_BY_HAND = by_hand("pacs_data, or PACS.zip (a browser is needed),", _PACS_PAGE, "pacs", "pacs_data.zip")


def _pacs(domain: str, images: int) -> DomainSource:
    return DomainSource(domain, manual=_PACS_BY_HAND, published=images)


PACS = DataSet(
    "pacs",
    "photographs, paintings, cartoons and sketches of seven classes",
    PACS_CLASSES,
    by_name(_pacs("photo", 1_670), _pacs("art_painting", 2_048), _pacs("cartoon", 2_344), _pacs("sketch", 3_929)),
)

# --- DomainNet

_DOMAINNET_HOSTS = (
    "https://csr.bu.edu/ftp/visda/2019/multi-source/",
    "http://csr.bu.edu/ftp/visda/2019/multi-source/",
)
_DOMAINNET_PAGE = "http://ai.bu.edu/M3SDA/"
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
        manual=by_hand(
            f"{domain}.zip, {domain}_train.txt and {domain}_test.txt",
            _DOMAINNET_PAGE,
            f"domainnet/{domain}",
            f"{domain}.zip {domain}_train.txt {domain}_test.txt",
        ),
        published=published,
        terms=_DOMAINNET_TERMS,
    )


def _domainnet_original(domain: str, published: int) -> DomainSource:
    name = f"domainnet_original/{domain}"
    manual = by_hand(f"{domain}.zip, the original version,", _DOMAINNET_PAGE, name, f"{domain}.zip")
    return DomainSource(domain, (_bu(f"{domain}.zip"),), manual=manual, published=published, terms=_DOMAINNET_TERMS)


DOMAINNET = DataSet(
    "domainnet",
    "ten classes of DomainNet in six domains, as cleaned by its authors (18 GB to download for all)",
    DOMAINNET_10,
    by_name(
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

DOMAINNET_ORIGINAL = DataSet(
    "domainnet_original",
    "the two domains of DomainNet that were cleaned later, as they first appeared",
    DOMAINNET_10,
    by_name(_domainnet_original("clipart", 2_067), _domainnet_original("painting", 4_799)),
    is_selection=True,
)
