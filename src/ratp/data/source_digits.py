"""Where the digits can be had. A hash stands here only where public catalogues agree on it.

What the domains' files are called in the collection Digits-Five (Peng et al., Moment Matching for Multi-Source Domain
Adaptation, ICCV 2019) is here, too: whoever works on these domains usually has it.
"""

from __future__ import annotations

from ratp.data.source_types import DataSet, DomainSource, Part, SourceFile, by_hand, by_name

DIGITS = tuple("0123456789")

_MNIST_MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
_SVHN = "http://ufldl.stanford.edu/housenumbers/"
_USPS = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"


def _mnist(name: str, size: int, sha256: str, part: Part, images: int) -> SourceFile:
    return SourceFile(name, tuple(mirror + name for mirror in _MNIST_MIRRORS), size, sha256, part, images)


DIGITS_SET = DataSet(
    "digits",
    "handwritten, printed and photographed digits in five domains",
    DIGITS,
    by_name(
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
            by_hand(
                "the idx files of MNIST",
                _MNIST_MIRRORS[0] + "train-images-idx3-ubyte.gz (and train-labels-idx1-ubyte.gz)",
                "mnist",
                "train-images-idx3-ubyte.gz train-labels-idx1-ubyte.gz",
            ),
            collected=("mnist_data.mat",),
        ),
        DomainSource(
            "mnist_m",
            manual=by_hand(
                "and unpack mnist_m.tar.gz (a browser is needed)",
                "https://drive.google.com/drive/folders/0B_tExHiYS-0vR2dNZEU4NGlSSW8",
                "mnist_m",
                "mnist_m/mnist_m_train mnist_m/mnist_m_train_labels.txt",
            )
            + "\nOr build it from MNIST after the published recipe:\n  ratp data build mnist-m --data FOLDER",
            rebuilds=True,
            published=59_001,
            collected=("mnistm_with_label.mat",),
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
            by_hand("train_32x32.mat (format 2)", _SVHN, "svhn", "train_32x32.mat"),
            terms="for non-commercial use only",
            collected=("svhn_train_32x32.mat", "svhn_test_32x32.mat"),
        ),
        DomainSource(
            "syn",
            manual=by_hand(
                "and unpack SynthDigits.zip (a browser is needed)",
                "https://drive.google.com/file/d/0B9Z4d7lAwbnTSVR1dEFSRUFxOUU/view",
                "syn",
                "synth_train_32x32.mat",
            )
            + "\nOr build it after the published recipe:\n  ratp data build syn --data FOLDER",
            rebuilds=True,
            collected=("synth_train_32x32.mat", "synth_test_32x32.mat"),
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
            by_hand("usps.bz2 and usps.t.bz2", _USPS, "usps", "usps.bz2 usps.t.bz2"),
            collected=("usps_28x28.mat",),
        ),
    ),
)
