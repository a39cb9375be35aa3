"""Every kind of image becomes the right pixels, and everything else a reason."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_images import encode, make_picture, pixels, png, raw_png
from PIL import Image, ImageFile

from ratp.data.decode import pixels as pixel_conversions
from ratp.data.decode.decode import decode
from ratp.data.decode.pixels import BadImage

SMALL = {
    "PNG": encode(make_picture(), "PNG"),
    "interlaced PNG": raw_png(1, 1, 8, 2, b"\0\1\2\3"),
    "JPEG": encode(make_picture(), "JPEG"),
    "progressive JPEG": encode(make_picture(), "JPEG", progressive=True),
    "WebP": encode(make_picture(), "WEBP"),
    "lossless WebP": encode(make_picture(), "WEBP", lossless=True),
    "animated WebP": encode(make_picture(), "WEBP", save_all=True, append_images=[make_picture(seed=1)]),
    "GIF": encode(make_picture(), "GIF", save_all=True, append_images=[make_picture(seed=1)]),
    "BMP": encode(make_picture(), "BMP"),
    "TIFF": encode(make_picture(), "TIFF"),
    "LZW TIFF": encode(make_picture(), "TIFF", compression="tiff_lzw"),
    "PPM": encode(make_picture(), "PPM"),
    "16-bit PNG": encode(Image.fromarray(pixels()[:, :, 0].astype(np.uint16) * 257), "PNG"),
    "palette PNG": encode(make_picture().quantize(16), "PNG"),
    "EXIF JPEG": encode(
        make_picture(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0"
    ),
}


def close(image, expected, tolerance=0):
    return image.shape == expected.shape and np.abs(image.astype(int) - expected.astype(int)).max() <= tolerance


class TestKinds:
    @pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "WEBP"])
    def test_lossless_formats(self, kind):
        decoded = decode(encode(make_picture(), kind, **({"lossless": True} if kind == "WEBP" else {})), None)
        assert close(decoded.image, pixels())
        assert (decoded.conversions, decoded.original_size) == ((), (12, 20))
        assert decoded.image.dtype == np.uint8 and decoded.image.flags.writeable

    def test_jpeg(self):
        decoded = decode(encode(make_picture(), "JPEG", quality=95, subsampling=0), None)
        assert close(decoded.image, pixels(), 6) and decoded.conversions == ()

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "PPM", "BMP"])
    def test_greyscale(self, kind):
        grey = pixels()[:, :, 0]
        decoded = decode(encode(Image.fromarray(grey), kind), None)
        assert close(decoded.image, np.stack([grey] * 3, axis=2), 6 if kind == "JPEG" else 0)
        assert decoded.conversions == ("greyscale",)

    @pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "PPM"])
    def test_black_and_white(self, kind):
        mask = pixels()[:, :, 0] > 128
        decoded = decode(encode(Image.fromarray(mask), kind), None)
        assert close(decoded.image, np.stack([mask * np.uint8(255)] * 3, axis=2))
        assert decoded.conversions == ("greyscale", "1-bit") or kind == "BMP"

    def test_cmyk(self):
        """Ink on all four plates, including one only black makes."""
        colours = np.array([[[0, 255, 255, 0], [255, 0, 255, 0], [0, 0, 0, 255], [0, 0, 0, 0]]], dtype=np.uint8)
        image = Image.frombytes("CMYK", (64, 16), colours.repeat(16, 0).repeat(16, 1).tobytes())
        decoded = decode(encode(image, "JPEG", quality=100), None)
        corners = decoded.image[8, 8::16].astype(int)
        expected = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 0], [255, 255, 255]])
        assert np.abs(corners - expected).max() < 12
        assert decoded.conversions == ("cmyk",)

    def test_palette(self):
        image = make_picture().quantize(32)
        for kind in ("PNG", "GIF", "TIFF"):
            decoded = decode(encode(image, kind), None)
            assert close(decoded.image, np.asarray(image.convert("RGB")))
            assert decoded.conversions == ("palette",)

    def test_palette_transparency_is_white(self):
        image = Image.new("P", (4, 1))
        image.putpalette([255, 0, 0, 0, 0, 255, 0, 255, 0])
        image.putdata([0, 1, 2, 1])
        for kind in ("PNG", "GIF"):
            decoded = decode(encode(image, kind, transparency=1), None)
            assert decoded.image.tolist() == [[[255, 0, 0], [255] * 3, [0, 255, 0], [255] * 3]]
            assert decoded.conversions == ("palette", "alpha")

    def test_palette_with_partial_transparency(self):
        image = Image.new("P", (3, 1))
        image.putpalette([200, 0, 0] * 3)
        image.putdata([0, 1, 2])
        decoded = decode(encode(image, "PNG", transparency=bytes([255, 51, 0])), None)
        assert decoded.image.tolist() == [[[200, 0, 0], [244, 204, 204], [255, 255, 255]]]

    @pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
    def test_alpha_is_composited_on_white(self, kind):
        alpha = np.linspace(0, 255, 240).reshape(12, 20)
        rgba = np.dstack([pixels(), alpha.astype(np.uint8)])
        options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
        decoded = decode(encode(Image.fromarray(rgba), kind, **options), None)
        share = alpha.astype(np.uint8)[:, :, None] / 255
        assert close(decoded.image, np.rint(pixels() * share + 255 * (1 - share)), 1)
        assert decoded.conversions == ("alpha",)

    def test_grey_with_alpha(self):
        image = Image.merge("LA", (Image.new("L", (2, 1), 100), Image.fromarray(np.array([[255, 0]], dtype=np.uint8))))
        decoded = decode(encode(image, "PNG"), None)
        assert decoded.image.tolist() == [[[100] * 3, [255] * 3]]
        assert decoded.conversions == ("alpha", "greyscale")

    def test_one_transparent_colour_without_a_palette(self):
        decoded = decode(
            raw_png(2, 1, 8, 2, b"\0" + bytes([1, 2, 3, 4, 5, 6]), (b"tRNS", bytes([0, 1, 0, 2, 0, 3]))), None
        )
        assert decoded.image.tolist() == [[[255] * 3, [4, 5, 6]]]
        assert decoded.conversions == ("alpha",)

    @pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
    def test_animation_gives_first_frame(self, kind):
        frames = [Image.new("RGB", (6, 4), colour) for colour in ("red", "lime", "blue")]
        options = {"lossless": True} if kind == "WEBP" else {}
        decoded = decode(encode(frames[0], kind, save_all=True, append_images=frames[1:], **options), None)
        assert (decoded.image == [255, 0, 0]).all()
        assert "animated" in decoded.conversions

    def test_multi_page_gives_first_page(self):
        pages = [Image.new("RGB", (6, 4), colour) for colour in ("red", "lime")]
        decoded = decode(encode(pages[0], "TIFF", save_all=True, append_images=pages[1:]), None)
        assert (decoded.image == [255, 0, 0]).all()
        assert decoded.conversions == ("multi-page",)

    def test_a_single_pixel(self):
        for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
            data = encode(Image.new("RGB", (1, 1), "white"), kind)
            assert decode(data, None).image.shape == (1, 1, 3)
            assert (decode(data, (5, 7)).image == np.full((5, 7, 3), 255)).all()


class TestDeepImages:
    RAMP = np.linspace(0, 65535, 240).astype(np.uint16).reshape(12, 20)
    EXPECTED = np.stack([np.rint(RAMP / 257)] * 3, axis=2)

    @pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
    def test_16_bit_grey_is_scaled_by_its_range(self, kind):
        data = encode(Image.fromarray(self.RAMP), kind)
        decoded = decode(data, None)
        assert close(decoded.image, self.EXPECTED)
        assert decoded.conversions == ("16-bit", "greyscale")

    @pytest.mark.parametrize(("kind", "values", "names"), [
        (b"P2", b"100 200", ("16-bit", "greyscale")), (b"P3", b"100 100 100 200 200 200", ("16-bit",))
    ])  # fmt: skip
    def test_16_bits_in_a_portable_map_of_text(self, kind, values, names):
        decoded = decode(kind + b" 2 1 65535\n" + values, None)
        assert decoded.image[0, :, 0].tolist() == [0, 1]
        assert decoded.conversions == names

    def test_a_dark_16_bit_image_stays_dark(self):
        decoded = decode(encode(Image.fromarray(self.RAMP // 256), "PNG"), None)
        assert decoded.image.max() == 1

    def test_16_bit_grey_of_another_byte_order_and_packed(self):
        swapped = encode(Image.frombytes("I;16B", (20, 12), self.RAMP.astype(">u2").tobytes()), "TIFF")
        packed = encode(Image.fromarray(self.RAMP), "TIFF", compression="tiff_lzw")
        for data in (swapped, packed):
            assert close(decode(data, None).image, self.EXPECTED)
            assert decode(data, None).conversions == ("16-bit", "greyscale")

    def test_10_bits_in_a_pgm(self):
        ramp = np.arange(0, 1024, 4, dtype=">u2")
        decoded = decode(b"P5 256 1 1023\n" + ramp.tobytes(), None)
        assert close(decoded.image[0, :, 0], np.rint(ramp / 1023 * 255), 1)
        assert decoded.conversions == ("16-bit", "greyscale")

    @pytest.mark.parametrize(("colour", "channels", "names"), [(2, 3, ("16-bit",)), (6, 4, ("16-bit", "alpha"))])
    def test_16_bit_colour(self, colour, channels, names):
        values = np.array([[0, 257, 32896, 65535][:channels], [65535] * channels], dtype=">u2")
        decoded = decode(raw_png(2, 1, 16, colour, b"\0" + values.tobytes()), None)
        assert decoded.image.tolist() == [[[0, 1, 128], [255] * 3]]
        assert decoded.conversions == names

    def test_16_bit_colour_in_a_ppm(self):
        values = np.array([0, 257, 32896, 65535, 65535, 65535], dtype=">u2")
        decoded = decode(b"P6 2 1 65535\n" + values.tobytes(), None)
        assert decoded.image.tolist() == [[[0, 1, 128], [255] * 3]]
        assert decoded.conversions == ("16-bit",)

    def test_16_bit_grey_with_a_transparent_value(self):
        values = np.array([1000, 25700], dtype=">u2").tobytes()
        decoded = decode(raw_png(2, 1, 16, 0, b"\0" + values, (b"tRNS", b"\x03\xe8")), None)
        assert decoded.image.tolist() == [[[255] * 3, [100] * 3]]
        assert decoded.conversions == ("16-bit", "alpha", "greyscale")

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            (np.array([[0, 100, 255]], dtype=np.int32), [0, 100, 255]),
            (np.array([[0, 25700, 65535]], dtype=np.int32), [0, 100, 255]),
            (np.array([[0, 10**9, 2 * 10**9]], dtype=np.int32), [0, 128, 255]),
            (np.array([[-1000, 0, 1000]], dtype=np.int32), [0, 128, 255]),
            (np.array([[0, 0.5, 1]], dtype=np.float32), [0, 128, 255]),
            (np.array([[0, 99.6, 255]], dtype=np.float32), [0, 100, 255]),
            (np.array([[-3, 0, 3]], dtype=np.float32), [0, 128, 255]),
            (np.array([[7e8, 7e8, 7e8]], dtype=np.float32), [0, 0, 0]),
            (np.array([[np.nan, -np.inf, 10, 410, np.inf]], dtype=np.float32), [0, 0, 0, 255, 255]),
        ],
    )
    def test_32_bit_grey(self, values, expected):
        decoded = decode(encode(Image.fromarray(values), "TIFF"), None)
        assert decoded.image[0, :, 0].tolist() == expected
        assert decoded.conversions == ("32-bit", "greyscale")

    def test_non_finite_pixels(self):
        with pytest.raises(BadImage, match="without any finite value"):
            decode(encode(Image.fromarray(np.full((2, 2), np.nan, dtype=np.float32)), "TIFF"), None)


def stored(upright, orientation):
    """The pixels as a file of that orientation holds them: by the definition of the tag."""
    return {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]


LARGE = {
    "16-bit": encode(Image.fromarray(np.full((3000, 3000), 40000, dtype=np.uint16)), "PNG"),
    "float": encode(Image.new("F", (3000, 3000), 0.5), "TIFF", compression="tiff_deflate"),
    "alpha": encode(Image.new("LA", (3000, 3000), (90, 90)), "PNG"),
}


class TestLargeImages:
    @pytest.mark.faults(27, "decoding takes 13 bytes of memory a pixel at most, 16 of WebP")
    def test_little_memory_is_used(self, tmp_path):
        program = """if True:
            import numpy, re, sys
            from pathlib import Path
            from ratp.data.decode.decode import decode_picture
            peak = lambda: 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
            files = [Path(name).read_bytes() for name in sys.argv[1:]]
            decode_picture(files.pop(), (8, 8))
            before = peak()
            for data in files:
                decode_picture(data, (8, 8))
                print((peak() - before) // 3000**2)
        """
        names = [tmp_path / name for name in (*LARGE, "small")]
        for name, data in zip(names, (*LARGE.values(), SMALL["PNG"]), strict=True):
            name.write_bytes(data)
        done = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, check=True)
        assert all(int(bytes_a_pixel) <= 13 for bytes_a_pixel in done.stdout.split()), done.stdout

    def test_strips_change_no_pixel(self, monkeypatch):
        ramp = np.linspace(-5, 700, 240, dtype=np.float32).reshape(12, 20)
        images = [Image.fromarray(ramp), Image.fromarray(ramp.astype(np.int32)), make_picture().convert("RGBA")]
        images[2].putalpha(make_picture().convert("L"))
        files = [encode(image, "TIFF") for image in images]
        whole = [decode(data, None) for data in files]
        monkeypatch.setattr(pixel_conversions, "_STRIP_PIXELS", 50)
        for data, expected in zip(files, whole, strict=True):
            found = decode(data, None)
            assert (found.image == expected.image).all() and found[1:] == expected[1:]


class TestOrientation:
    @pytest.mark.parametrize("orientation", range(1, 9))
    @pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
    def test_orientation_is_applied(self, kind, orientation):
        upright = pixels(16, 32)
        exif = Image.Exif()
        exif[0x0112] = orientation
        options = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}.get(kind, {})
        data = encode(Image.fromarray(np.ascontiguousarray(stored(upright, orientation))), kind, exif=exif, **options)
        decoded = decode(data, None)
        assert close(decoded.image, upright, 8 if kind == "JPEG" else 0)
        assert decoded.original_size == (16, 32)
        assert decoded.conversions == (() if orientation == 1 else ("exif-rotated",))

    @pytest.mark.parametrize(
        "note", [b"Exif\0\0", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"Exif\0\0garbage", b"\xff" * 50]
    )
    def test_damaged_exif_is_ignored(self, note):
        assert close(decode(encode(make_picture(), "JPEG", quality=95, exif=note), None).image, pixels(), 25)

    def test_unknown_orientation(self):
        exif = Image.Exif()
        exif[0x0112] = 9
        assert decode(encode(make_picture(), "PNG", exif=exif), None).conversions == ()


class TestSize:
    @pytest.mark.parametrize("size", [(32, 32), (6, 10), (5, 40), (1, 1), (12, 20)])
    def test_resize_is_bilinear_with_antialiasing(self, size):
        """As torch does it, but for rounding."""
        decoded = decode(png(), size)
        image = torch.from_numpy(pixels()).permute(2, 0, 1)[None].float()
        expected = torch.nn.functional.interpolate(image, size, mode="bilinear", antialias=True, align_corners=False)
        assert close(decoded.image, expected[0].permute(1, 2, 0).round().numpy(), 1)
        assert decoded.original_size == (12, 20)


def truncations(data):
    return [data[:length] for length in sorted({1, 2, 3, 5, 8, 16, 33, len(data) // 4, len(data) // 2, len(data) - 40})]


class TestBadFiles:
    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (b"", r"empty \(0 bytes\)"),
            (bytes(1000), "nothing but zeros"),
            (b"<!DOCTYPE html><html><body>404</body></html>", "a web page, not an image"),
            (b"\xef\xbb\xbf\n  <HTML lang=en>", "a web page, not an image"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "a Git LFS pointer"),
            (b"just some text", r"not an image of a known format \(PNG, JPEG"),
            (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image of a known format"),
            (png()[:20], "truncated: the PNG data ends too early"),
            (b"\xff\xd8\xff\xe0", "a damaged or truncated JPEG file"),
            (png()[:-40], "truncated: the PNG data ends too early"),
            (SMALL["JPEG"][:-40], "truncated: the JPEG data ends too early"),
            (SMALL["WebP"][:-20], "WEBP"),
        ],
    )
    def test_reasons_are_readable(self, data, reason):
        with pytest.raises(BadImage, match=reason) as caught:
            decode(data, (8, 8))
        assert "0x" not in str(caught.value) and "\n" not in str(caught.value)

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "progressive JPEG", "WebP", "lossless WebP", "BMP", "TIFF", "PPM"])
    def test_truncated(self, kind):
        for data in truncations(SMALL[kind]):
            with pytest.raises(BadImage):
                decode(data, None)

    @pytest.mark.faults(26, "a report of damage from a decoder does not count while memory is too small")
    def test_too_little_memory_is_no_damage(self, tmp_path):
        """In a process that has freed nothing the decoder could use."""
        program = """if True:
            import resource, sys
            from pathlib import Path
            from ratp.data.decode.decode import decode_picture
            files = [Path(name).read_bytes() for name in sys.argv[1:]]
            for data in files[::2]:
                decode_picture(data, (8, 8))
            in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**24, in_use + 2**24))
            for data in files[1::2]:
                try:
                    decode_picture(data, (8, 8))
                except MemoryError:
                    print("memory")
        """
        names = []
        for kind in ("PNG", "JPEG", "WEBP", "TIFF"):
            for side in (8, 5000):
                names.append(tmp_path / f"{side}.{kind}")
                names[-1].write_bytes(encode(Image.new("RGB", (side, side), "red"), kind))
        done = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["memory"] * 4

    def test_truncated_even_if_pillow_setting_allows(self, monkeypatch):
        monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        with pytest.raises(BadImage, match="truncated"):
            decode(png()[:-40], None)
        assert ImageFile.LOAD_TRUNCATED_IMAGES is True

    @pytest.mark.parametrize("size", [(100_000, 100_000), (11_000, 10_000), (2**31 - 1, 1), (1, 2**31 - 1)])
    def test_too_many_pixels_are_refused_from_header(self, size):
        with pytest.raises(BadImage, match="too many pixels"):
            decode(raw_png(*size, 8, 2, b""), (8, 8))

    def test_large_image_below_limit_is_read(self):
        assert Image.MAX_IMAGE_PIXELS < 9_500 * 10_000
        with pytest.raises(BadImage, match="truncated"):
            decode(raw_png(9_500, 10_000, 8, 2, b""), (8, 8))

    def test_unsupported_colour_model(self):
        with pytest.raises(BadImage, match="colour model LAB"):
            decode(encode(Image.new("LAB", (4, 4)), "TIFF"), None)

    def test_damage_check_detects_damage(self):
        """What the tests below mutate decodes as it is."""
        for data in SMALL.values():
            decode(data, (8, 8))


def decodes_or_says_why(data):
    with suppress(BadImage):
        assert decode(data, (8, 8)).image.shape == (8, 8, 3)


@given(kind=st.sampled_from(sorted(SMALL)), length=st.floats(0, 1))
def test_any_truncation_decodes_or_is_a_bad_image(kind, length):
    decodes_or_says_why(SMALL[kind][: int(length * len(SMALL[kind]))])


@given(kind=st.sampled_from(sorted(SMALL)), place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_flipped_bit_decodes_or_is_a_bad_image(kind, place, bit):
    data = bytearray(SMALL[kind])
    data[place % len(data)] ^= 1 << bit
    decodes_or_says_why(bytes(data))


@given(kind=st.sampled_from(sorted(SMALL)), place=st.integers(0, 10**6), junk=st.binary(max_size=40))
def test_inserted_junk_decodes_or_is_a_bad_image(kind, place, junk):
    data = bytearray(SMALL[kind])
    data[place % len(data) : place % len(data) + len(junk)] = junk
    decodes_or_says_why(bytes(data))


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_a_bad_image(data):
    decodes_or_says_why(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WebP", "lossless WebP"])
def test_every_single_flip_near_the_start(kind):
    """Where the headers are, all of them."""
    for place in range(min(60, len(SMALL[kind]))):
        for bit in range(8):
            data = bytearray(SMALL[kind])
            data[place] ^= 1 << bit
            decodes_or_says_why(bytes(data))


def test_decoding_is_deterministic():
    for data in SMALL.values():
        assert (decode(data, (8, 9)).image == decode(io.BytesIO(data).getvalue(), (8, 9)).image).all()
