"""What counts as an image of a domain, in which order, and what is refused."""

from __future__ import annotations

import os
import random
import stat
import struct
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_images import closed, make_small_domain, png, real_data, write_files, write_zip

from ratp.data.decode.pixels import BadImage
from ratp.data.read.archive import ArchiveLimits
from ratp.data.read.tree import identity, open_tree, remarks_on
from ratp.errors import RatpError

FILES = make_small_domain()


def names(tree):
    return [file.name for file in tree.files]


class TestLayout:
    def test_class_folders(self, tmp_path):
        tree = open_tree(write_files(tmp_path / "photo", FILES))
        assert tree.name == "photo"
        assert tree.classes == ("cat", "dog")
        assert [(file.name, file.class_name) for file in tree.files] == [(name, name[:3]) for name in sorted(FILES)]
        assert [tree.read(file) for file in tree.files] == [FILES[name] for name in sorted(FILES)]
        assert [file.size for file in tree.files] == [len(FILES[name]) for name in sorted(FILES)]

    def test_extra_outer_folder(self, tmp_path):
        tree = open_tree(write_files(tmp_path / "photo", {f"whatever/{name}": data for name, data in FILES.items()}))
        assert tree.classes == ("cat", "dog")
        assert names(tree) == sorted(FILES)
        assert tree.read(tree.files[0]) == FILES["cat/0.png"]

    def test_flat_images_have_no_classes(self, tmp_path):
        tree = open_tree(write_files(tmp_path / "new", {"b.png": png(), "a.png": png()}))
        assert tree.classes is None
        assert [(file.name, file.class_name) for file in tree.files] == [("a.png", None), ("b.png", None)]

    def test_a_single_folder_of_images_is_a_class_unless_it_is_called_like_the_domain(self, tmp_path):
        assert open_tree(write_files(tmp_path / "new", {"cat/1.png": png()})).classes == ("cat",)
        tree = open_tree(write_zip(tmp_path / "phone.zip", {"phone/1.png": png()}))
        assert (tree.classes, names(tree)) == (None, ["1.png"])

    def test_subfolders_belong_to_their_class(self, tmp_path):
        tree = open_tree(write_files(tmp_path, {"cat/a/b/1.png": png(), "cat/2.png": png(), "dog/a/3.png": png()}))
        assert {file.name: file.class_name for file in tree.files} == {
            "cat/2.png": "cat",
            "cat/a/b/1.png": "cat",
            "dog/a/3.png": "dog",
        }

    @pytest.mark.parametrize("around", ["", "photo/"])
    def test_images_beside_class_folders_are_refused_and_both_named(self, tmp_path, around):
        folder = write_files(tmp_path, {f"{around}cat/1.png": png(), f"{around}stray.jpg": png()})
        with pytest.raises(RatpError, match=r"both beside and in class folders: 'stray.jpg', and folders 'cat'"):
            open_tree(folder)

    def test_image_suffixes_ignore_case(self, tmp_path):
        endings = ["png", "JPG", "jpeg", "WebP", "bmp", "GIF", "tif", "TIFF", "ppm", "pgm"]
        endings += ["jfif", "JPE", "pjpeg", "mpo", "apng", "pbm", "pnm"]
        tree = open_tree(write_files(tmp_path, {f"cat/x.{ending}": b"" for ending in endings}))
        assert len(tree.files) == len(endings)

    def test_other_files_are_listed_but_not_clutter(self, tmp_path):
        others = {"readme.txt": b"", "cat/labels.csv": b"", "cat/png": b""}
        clutter = [".DS_Store", "cat/Thumbs.db", "__MACOSX/cat/._1.png", ".git/1.png", "cat/.2.png", "desktop.ini"]
        files = {"cat/1.png": png(), **others, **dict.fromkeys(clutter, b"")}
        for tree in (open_tree(write_files(tmp_path / "d", files)), open_tree(write_zip(tmp_path / "d.zip", files))):
            assert names(tree) == ["cat/1.png"]
            assert tree.ignored == tuple(sorted(others))

    def test_possible_images_are_reported_separately(self, tmp_path):
        meant = ["cat/1.HEIC", "cat/2.avif", "cat/3.jpg_large", "cat/4.tiff64", "cat/raw/5.cr2"]
        files_without_ending = {"cat/6": png(), "cat/7": b"\xff\xd8\xff\xe0"}
        others = [
            "labels.csv",
            "cat/1.jpg.txt",
            "a.xml",
            "a.json",
            "a.md",
            "LICENSE",
            "cat/.8",
            "Thumbs.db",
            "x.npy",
            "cat/9.jpgw",
            "a.gifv",
        ]
        files = {"cat/1.png": png(), **dict.fromkeys([*meant, *others], b"text"), **files_without_ending}
        for tree in (open_tree(write_files(tmp_path / "d", files)), open_tree(write_zip(tmp_path / "d.zip", files))):
            assert names(tree) == ["cat/1.png"]
            assert tree.unsupported == tuple(sorted([*meant, *files_without_ending]))
            (remark,) = remarks_on(tree)
            assert remark.startswith("7 files skipped, unsupported format: without ending (2), ")
            assert ".heic (1)" in remark
        files = {"cat/1.png": png(), "cat/2.heic": b""}
        (remark,) = remarks_on(open_tree(write_files(tmp_path / "one", files)))
        assert remark.startswith("1 file skipped, unsupported format: .heic (1). ")

    @pytest.mark.parametrize("around", ["", "pics/"])
    def test_several_domains_are_not_read_as_one(self, tmp_path, around):
        """Their names would be the classes."""
        layout = ["day/cat/1.png", "day/dog/2.png", "rain/cat/3.png", "rain/dog/4.png", "night/5.png"]
        files = {f"{around}{name}": png() for name in layout}
        folder = write_files(tmp_path / "d", files)
        remark = r"looks like several domains, not like one: 'day', 'night', 'rain'; .* in more than one of them\."
        with pytest.raises(
            RatpError, match=rf"{remark} If they are classes, .* give one of them, e\.g\. {folder}/{around}day\."
        ):
            open_tree(folder)
        with pytest.raises(RatpError, match=rf"{remark} If they .* give one of them in a zip or a folder of its own\."):
            open_tree(write_zip(tmp_path / "d.zip", files))
        assert open_tree(folder, labelled=False).classes is None
        known = open_tree(folder, sure=True)
        assert known.classes == ("day", "night", "rain")
        (remark,) = remarks_on(known)
        assert "If 'day' is not a class but a domain" in remark

    def test_two_shared_class_names_do_not_refuse_the_rest(self, tmp_path):
        files = [f"{name}/1.png" for name in "abcdefgh"]
        files += [f"{name}/{year}/1.png" for name in ("w", "x") for year in ("2019", "2020")]
        tree = open_tree(write_files(tmp_path, dict.fromkeys(files, png())))
        assert tree.classes == (*"abcdefgh", "w", "x")
        assert "If 'w' is not a class" in remarks_on(tree)[0]

    def test_folders_of_several_sets_are_not_one_domain(self, tmp_path):
        sets = {"digits": ("mnist", "usps"), "pets": ("photo", "sketch")}
        places = [f"{name}/{domain}/{label}" for name, domains in sets.items() for domain in domains for label in "01"]
        with pytest.raises(RatpError, match="one: 'digits/mnist', 'digits/usps', 'pets/photo', 'pets/sketch'; folders"):
            open_tree(write_files(tmp_path, {f"{place}/1.png": png() for place in places}))

    @pytest.mark.parametrize(
        ("layout", "expected"),
        [
            (["cat/images/1.png", "dog/images/2.png"], []),
            (["cat/siamese/1.png", "cat/persian/2.png", "dog/poodle/3.png"], []),
            (["cat/2024/1.png", "cat/2025/2.png", "dog/2024/3.png"], []),
            (["cat/old/1.png", "cat/2.png", "dog/3.png"], []),
            (["cat/2024/1.png", "cat/2025/2.png", "dog/3.png"], ["to it: 'cat/2024', 'cat/2025'. If 'cat' is"]),
        ],
    )
    def test_nested_folders_belong_to_their_class(self, tmp_path, layout, expected):
        tree = open_tree(write_files(tmp_path, dict.fromkeys(layout, png())))
        assert tree.classes == ("cat", "dog")
        assert [words in remark for words, remark in zip(expected, remarks_on(tree), strict=True)] == [True] * len(
            expected
        )

    def test_empty_class_folders_are_ignored(self, tmp_path):
        write_files(tmp_path, {"cat/1.png": png()})
        (tmp_path / "dog").mkdir()
        assert open_tree(tmp_path).classes == ("cat",)

    @pytest.mark.parametrize("files", [{}, {"cat/notes.txt": b""}])
    def test_a_domain_without_images_is_refused(self, tmp_path, files):
        (tmp_path / "d").mkdir()
        for path in (write_files(tmp_path / "d", files), write_zip(tmp_path / "d.zip", files)):
            with pytest.raises(RatpError, match="has no images: expected class/image") as caught:
                open_tree(path)
            assert ("notes.txt" in str(caught.value)) == bool(files)

    def test_class_renamed_in_one_domain_is_visible(self, tmp_path):
        one = open_tree(write_files(tmp_path / "one", FILES))
        other = open_tree(write_files(tmp_path / "two", {n.replace("dog", "Dog"): data for n, data in FILES.items()}))
        assert one.classes == ("cat", "dog")
        assert other.classes == ("Dog", "cat")

    def test_unicode_forms_of_a_class_name_are_equal(self, tmp_path):
        composed, decomposed = "na\u00efve \u00fc", "nai\u0308ve u\u0308"
        trees = [
            open_tree(write_files(tmp_path / str(k), {f"{n}/1.png": png()}))
            for k, n in enumerate((composed, decomposed))
        ]
        assert trees[0].classes == trees[1].classes == (composed,)
        assert [tree.read(tree.files[0]) for tree in trees] == [png()] * 2

    def test_missing_and_invalid_paths(self, tmp_path):
        with pytest.raises(RatpError, match="does not exist"):
            open_tree(tmp_path / "nowhere")
        write_files(tmp_path, {"a.tar": b"", "b.png": png()})
        for name in ("a.tar", "b.png"):
            with pytest.raises(RatpError, match=r"neither a folder nor a \.zip"):
                open_tree(tmp_path / name)
        with pytest.raises(RatpError, match="does not exist"):
            open_tree(tmp_path / "b.png" / "below")
        with pytest.raises(RatpError, match="cannot read"):
            open_tree(tmp_path / ("x" * 300))


class TestNames:
    NAMES = (
        "画像/写真 1.png",
        "naïve ü/Größe é.png",
        f"{'k' * 200}/{'n' * 196}.png",
        "a b/c  d.png",
        "e'\"<&>/;$(x).png",
    )

    def test_any_name_is_read(self, tmp_path):
        files = {name: png(k) for k, name in enumerate(self.NAMES)}
        for tree in (open_tree(write_files(tmp_path / "d", files)), open_tree(write_zip(tmp_path / "d.zip", files))):
            assert names(tree) == sorted(files)
            assert {file.name: tree.read(file) for file in tree.files} == files
            assert tree.classes == tuple(sorted(name.split("/")[0] for name in files))

    def test_non_text_names(self, tmp_path):
        folder = os.fsencode(tmp_path) + b"/cl\xe9"
        os.mkdir(folder)
        with open(folder + b"/\xff.png", "wb") as file:
            file.write(png())
        tree = open_tree(tmp_path)
        assert tree.read(tree.files[0]) == png()
        assert len(identity(tree)) == 64

    def test_utf8_archive_without_flag(self, tmp_path):
        path = write_zip(tmp_path / "d.zip", {"画像/1.png": png(), "ascii/1.png": png()})
        data = path.read_bytes()
        for record, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            start = data.index(record)
            flags = struct.unpack_from("<H", data, start + at)[0]
            data = data[: start + at] + struct.pack("<H", flags & ~0x800) + data[start + at + 2 :]
        path.write_bytes(data)
        with zipfile.ZipFile(path) as archive:
            assert archive.namelist()[0] != "画像/1.png"
        tree = open_tree(path)
        assert tree.classes == ("ascii", "画像")
        assert tree.read(tree.files[1]) == png()


class TestOrder:
    def test_it_does_not_depend_on_the_file_system(self, tmp_path, monkeypatch):
        write_files(tmp_path, make_small_domain(("b", "a", "Z", "ä"), 5))
        expected = open_tree(tmp_path)
        assert names(expected) == sorted(names(expected))
        scandir, chance = os.scandir, random.Random(0)

        class Shuffled:
            def __init__(self, path):
                with scandir(path) as entries:
                    self.entries = list(entries)
                chance.shuffle(self.entries)

            def __enter__(self):
                return iter(self.entries)

            def __exit__(self, *_):
                pass

        monkeypatch.setattr(os, "scandir", Shuffled)
        for _ in range(5):
            tree = open_tree(tmp_path)
            assert (tree.files, identity(tree)) == (expected.files, identity(expected))

    def test_folder_and_archive_agree(self, tmp_path):
        members = dict(reversed(FILES.items()))
        folder, archive = (
            open_tree(write_files(tmp_path / "d", FILES)),
            open_tree(write_zip(tmp_path / "d.zip", members)),
        )
        assert names(folder) == names(archive)
        assert (folder.name, folder.classes) == (archive.name, archive.classes)


class TestOutOfReach:
    def test_an_unreadable_folder_is_named(self, tmp_path, monkeypatch):
        write_files(tmp_path, FILES)
        closed(monkeypatch, "dog")
        tree = open_tree(tmp_path)
        assert tree.classes == ("cat",)
        assert tree.unreadable == (("dog", "is a folder that cannot be read: Permission denied"),)

    def test_unreadable_domain_is_an_error(self, tmp_path, monkeypatch):
        def refusing(_):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "scandir", refusing)
        with pytest.raises(RatpError, match=r"cannot read the folder .*Permission denied"):
            open_tree(tmp_path)

    def test_file_link_is_followed_and_broken_link_named(self, tmp_path):
        write_files(tmp_path, {"d/cat/1.png": png(1), "elsewhere/2.png": png(2)})
        (tmp_path / "d/cat/2.png").symlink_to(tmp_path / "elsewhere/2.png")
        (tmp_path / "d/cat/3.png").symlink_to("gone.png")
        (tmp_path / "d/dog").symlink_to("gone")
        tree = open_tree(tmp_path / "d")
        assert [tree.read(file) for file in tree.files] == [png(1), png(2)]
        assert tree.unreadable == (("cat/3.png", "is a link to nothing"), ("dog", "is a link to nothing"))

    def test_links_to_folders_are_followed_once(self, tmp_path):
        write_files(tmp_path, {"d/cat/1.png": png(1), "elsewhere/2.png": png(2)})
        (tmp_path / "d/a_cat").symlink_to("cat")
        (tmp_path / "d/dog").symlink_to(tmp_path / "elsewhere")
        tree = open_tree(tmp_path / "d")
        assert names(tree) == ["cat/1.png", "dog/2.png"]
        assert tree.ignored == ("a_cat (leads to a folder that is listed already)",)

    def test_link_loops_end(self, tmp_path):
        write_files(tmp_path, {"d/cat/1.png": png(), "d/dog/2.png": png()})
        (tmp_path / "d/cat/up").symlink_to("..")
        (tmp_path / "d/cat/far_up").symlink_to(tmp_path)
        (tmp_path / "d/cat/self").symlink_to("self")
        for k in range(6):
            (tmp_path / f"d/cat/ring{k}").symlink_to(tmp_path / "d/dog")
            (tmp_path / f"d/dog/ring{k}").symlink_to(tmp_path / "d/cat")
        tree = open_tree(tmp_path / "d")
        assert names(tree) == ["cat/1.png", "dog/2.png"]
        assert [name for name, _ in tree.unreadable] == ["cat/self"]

    def test_a_pipe_is_not_opened(self, tmp_path):
        write_files(tmp_path, {"cat/1.png": png()})
        os.mkfifo(tmp_path / "cat/2.png")
        assert open_tree(tmp_path).unreadable == (("cat/2.png", "is a pipe or a device, not a file"),)

    def test_file_removed_or_changed_after_listing(self, tmp_path):
        tree = open_tree(write_files(tmp_path, FILES))
        (tmp_path / tree.files[0].name).unlink()
        (tmp_path / tree.files[1].name).write_bytes(b"123")
        with pytest.raises(BadImage, match="cannot be read: No such file"):
            tree.read(tree.files[0])
        with pytest.raises(BadImage, match=r"has changed since it was listed: \d+ bytes then, 3 now"):
            tree.read(tree.files[1])

    def test_oversized_file_is_not_read_whole(self, tmp_path):
        path = write_files(tmp_path, {"cat/1.png": png()}) / "cat/1.png"
        os.truncate(path, 600 * 2**20)
        tree = open_tree(tmp_path)
        with pytest.raises(BadImage, match="larger than 512 MiB"):
            tree.read(tree.files[0])


def craft_archive(path: Path, change) -> Path:
    """An archive of two images whose second member is written as ``change`` makes it."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("cat/1.png", png(1))
        info = zipfile.ZipInfo("cat/2.png")
        change(info)
        archive.writestr(info, png(2))
    return path


def named(name):
    return lambda info: setattr(info, "filename", name)


def of_kind(kind):
    return lambda info: setattr(info, "external_attr", (kind | 0o644) << 16)


class TestArchives:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (named("../2.png"), r"'\.\.' in the path: '\.\./2\.png'"),
            (named("cat/../../2.png"), r"'\.\.' in the path"),
            (named("../../etc/passwd"), r"'\.\.' in the path"),
            (named("/etc/2.png"), "an absolute path"),
            (named("C:/2.png"), "a drive letter"),
            (named("cat\\..\\2.png"), "a backslash in the name"),
            (named("\\\\server\\2.png"), "a backslash in the name"),
            (of_kind(stat.S_IFLNK), "a link instead of a file"),
            (of_kind(stat.S_IFCHR), "a device or a pipe"),
            (of_kind(stat.S_IFBLK), "a device or a pipe"),
            (of_kind(stat.S_IFIFO), "a device or a pipe"),
            (lambda info: setattr(info, "compress_type", zipfile.ZIP_BZIP2), "other than 'store' and 'deflate'"),
            (lambda info: setattr(info, "compress_type", zipfile.ZIP_LZMA), "other than 'store' and 'deflate'"),
        ],
    )
    @pytest.mark.faults(7, "ratp refuses an archive with links, devices or paths that lead outside")
    def test_malicious_members_are_refused(self, tmp_path, change, reason):
        with pytest.raises(RatpError, match=f"is refused:\n.*{reason}"):
            open_tree(craft_archive(tmp_path / "d.zip", change))

    def test_unmodified_crafted_archive_is_read(self, tmp_path):
        tree = open_tree(craft_archive(tmp_path / "d.zip", of_kind(stat.S_IFREG)))
        assert [tree.read(file) for file in tree.files] == [png(1), png(2)]

    @pytest.mark.parametrize("second", ["cat/1.png", "./cat/1.png", "cat//1.png"])
    def test_duplicate_member_name(self, tmp_path, second):
        with zipfile.ZipFile(tmp_path / "d.zip", "w") as archive:
            archive.writestr("cat/1.png", png(1))
            if second == "cat/1.png":
                with pytest.warns(UserWarning, match="Duplicate"):
                    archive.writestr(second, png(2))
            else:
                archive.writestr(second, png(2))
        with pytest.raises(RatpError, match=r"1 member\(s\) with the same name twice"):
            open_tree(tmp_path / "d.zip")

    def test_null_byte_in_name(self, tmp_path):
        path = write_zip(tmp_path / "d.zip", {"cat/1.png": png(), "cat/2.png?.exe": png()})
        path.write_bytes(path.read_bytes().replace(b"2.png?.exe", b"2.png\0.exe"))
        with pytest.raises(RatpError, match="a zero byte in the name"):
            open_tree(path)

    def test_encrypted_images(self, tmp_path):
        path = write_zip(tmp_path / "d.zip", {"cat/1.png": png(), "notes.txt": b""})
        data = bytearray(path.read_bytes())
        data[data.index(b"PK\x01\x02") + 8] |= 1
        path.write_bytes(data)
        with pytest.raises(RatpError, match=r"1 image\(s\) are encrypted: 'cat/1.png'"):
            open_tree(path)

    def test_all_reasons_come_at_once(self, tmp_path):
        path = write_zip(
            tmp_path / "d.zip", {"../1.png": png(), "/2.png": png(), **{f"c\\{k}.png": b"" for k in range(9)}}
        )
        with pytest.raises(RatpError) as caught:
            open_tree(path)
        lines = str(caught.value).splitlines()
        assert len(lines) == 5
        assert "9 member(s) with a backslash" in lines[3] and lines[3].endswith(", ….")
        assert "give the folder" in lines[4]

    def test_too_many_members(self, tmp_path):
        path = write_zip(tmp_path / "d.zip", FILES)
        with pytest.raises(RatpError, match="it has 6 members, and at most 5 are read"):
            open_tree(path, ArchiveLimits(members=5))
        assert len(open_tree(path, ArchiveLimits(members=6)).files) == 6

    def test_too_large_members_and_too_much_in_all(self, tmp_path):
        path = write_zip(
            tmp_path / "d.zip", {"cat/1.png": bytes(2 * 2**20), "cat/2.png": b"1", "film.mp4": bytes(2**22)}
        )
        with pytest.raises(RatpError, match=r"1 image\(s\) larger than 1 MiB: 'cat/1.png'"):
            open_tree(path, ArchiveLimits(file_bytes=2**20))
        with pytest.raises(RatpError, match=r"its images take 0\.0 GiB unpacked"):
            open_tree(path, ArchiveLimits(total_bytes=2 * 2**20))
        assert len(open_tree(path, ArchiveLimits(file_bytes=2**21, total_bytes=2**21 + 1)).files) == 2

    @pytest.mark.faults(7, "ratp refuses an archive that would unpack to a far larger size")
    def test_decompression_bomb(self, tmp_path):
        files = {"cat/1.bmp": bytes(40 * 2**20), "cat/2.bmp": bytes(2**20)}
        path = write_zip(tmp_path / "d.zip", files, zipfile.ZIP_DEFLATED)
        with pytest.raises(RatpError, match=r"1 image\(s\) packed more than 200:1, as only bombs are: 'cat/1.bmp'"):
            open_tree(path)

    @pytest.mark.faults(7, "ratp refuses an archive that would unpack to a far larger size")
    def test_decompression_bomb_of_many_members(self, tmp_path):
        files = {f"cat/{k}.bmp": bytes(2**20) for k in range(4)}
        path = write_zip(tmp_path / "d.zip", {**files, "cat/5.bmp": b"BM"}, zipfile.ZIP_DEFLATED)
        with pytest.raises(RatpError, match=r"4 image\(s\) packed more than 200:1, as only bombs are: 'cat/0.bmp'"):
            open_tree(path, ArchiveLimits(ratio_total_bytes=3 * 2**20))
        assert len(open_tree(path).files) == 5
        most = ArchiveLimits()
        assert 60 * 31 * 2**20 > most.ratio_total_bytes >= most.ratio_from_bytes

    def test_member_larger_than_declared(self, tmp_path):
        path = write_zip(tmp_path / "d.zip", {"cat/1.bmp": bytes(10**6)}, zipfile.ZIP_DEFLATED)
        data = bytearray(path.read_bytes())
        struct.pack_into("<I", data, data.index(b"PK\x01\x02") + 24, 100)
        path.write_bytes(data)
        tree = open_tree(path)
        assert tree.files[0].size == 100
        with pytest.raises(BadImage, match="damaged in the archive"):
            tree.read(tree.files[0])

    def test_damaged_member_fails_its_checksum(self, tmp_path):
        path = write_zip(tmp_path / "d.zip", FILES)
        data = bytearray(path.read_bytes())
        data[data.index(b"IDAT") + 6] ^= 1
        path.write_bytes(data)
        tree = open_tree(path)
        with pytest.raises(BadImage, match=r"damaged in the archive \(Bad CRC-32"):
            tree.read(tree.files[0])
        assert tree.read(tree.files[1]) == FILES["cat/1.png"]

    def test_truncated_archive_gives_one_message(self, tmp_path):
        whole = write_zip(tmp_path / "d.zip", FILES).read_bytes()
        for length in range(0, len(whole), 61):
            (tmp_path / "cut.zip").write_bytes(whole[:length])
            with pytest.raises(RatpError, match=r"is damaged or not a zip archive .* Download it or make it again"):
                open_tree(tmp_path / "cut.zip")

    def test_what_is_not_an_archive(self, tmp_path):
        write_files(tmp_path, {"page.zip": b"<!doctype html><title>Not found</title>"})
        with pytest.raises(RatpError, match="is damaged or not a zip archive"):
            open_tree(tmp_path / "page.zip")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    return tmp_path_factory.mktemp("archives")


@given(place=st.integers(0, 10**6), bit=st.integers(0, 7), packed=st.booleans())
def test_any_flipped_bit_of_an_archive_is_harmless(workshop, place, bit, packed):
    """It is noticed, or in a place that does not matter; nothing else is raised."""
    path = write_zip(workshop / "d.zip", FILES, zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(data)
    try:
        tree = open_tree(path)
    except RatpError:
        return
    for file in tree.files:
        with suppress(BadImage):
            assert tree.read(file) in FILES.values()


class TestIdentity:
    def test_identity_changes_with_the_listing(self, tmp_path):
        write_files(tmp_path, FILES)
        seen = {identity(open_tree(tmp_path))}

        def changed():
            before = len(seen)
            seen.add(identity(open_tree(tmp_path)))
            return len(seen) == before + 1

        assert not changed()
        os.utime(tmp_path / "cat/0.png", ns=(1, 1))
        assert changed()
        os.utime(tmp_path / "cat/0.png", ns=(1, 2))
        assert changed()
        write_files(tmp_path, {"cat/0.png": png() + b"1"})
        os.utime(tmp_path / "cat/0.png", ns=(1, 2))
        assert changed()
        (tmp_path / "cat/0.png").rename(tmp_path / "cat/00.png")
        assert changed()
        (tmp_path / "cat").rename(tmp_path / "cow")
        assert changed()
        (tmp_path / "cow/1.png").unlink()
        assert changed()
        (tmp_path / "cow/gone.png").symlink_to("nowhere")
        assert changed()
        write_files(tmp_path, {"notes.txt": b""})
        assert not changed()

    def test_identity_of_archive_is_of_its_contents(self, tmp_path):
        one = identity(open_tree(write_zip(tmp_path / "one.zip", FILES)))
        assert identity(open_tree(write_zip(tmp_path / "two.zip", dict(reversed(FILES.items()))))) == one
        assert identity(open_tree(write_zip(tmp_path / "three.zip", {**FILES, "cat/0.png": png(77)}))) != one

    def test_identity_reads_no_image(self, tmp_path, monkeypatch):
        write_files(tmp_path / "d", FILES)
        write_zip(tmp_path / "d.zip", FILES)

        def never(*_, **__):
            raise AssertionError("an image was opened")

        monkeypatch.setattr(Path, "open", never)
        monkeypatch.setattr(zipfile.ZipFile, "open", never)
        for name in ("d", "d.zip"):
            identity(open_tree(tmp_path / name))


@pytest.mark.parametrize(
    ("path", "count", "classes"),
    [
        ("pacs/sketch.zip", 3929, ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")),
        ("digits/usps.zip", 9298, tuple("0123456789")),
    ],
)
def test_real_archives(path, count, classes):
    tree = open_tree(real_data() / path)
    assert (len(tree.files), tree.classes) == (count, classes)
    assert names(tree) == sorted(names(tree))
    assert not tree.ignored and not tree.unreadable
    assert all(len(tree.read(file)) == file.size for file in tree.files[::500])
