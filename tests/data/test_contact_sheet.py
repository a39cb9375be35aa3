"""The contact sheet shows the images as they are, class by class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from helpers import ratp
from ratp.data.contact_sheet import contact_sheet
from ratp.data.domain import LabelledDomain
from ratp.errors import RatpError

RED, GREEN, BLUE = (250, 10, 20), (10, 240, 30), (20, 30, 230)
EMPTY = (240, 242, 244)


def plain_domain(colours, labels, side=(32, 32), name="plain", classes=("zero", "one")) -> LabelledDomain:
    images = torch.tensor(colours, dtype=torch.uint8)[:, :, None, None].expand(-1, -1, *side).contiguous()
    return LabelledDomain(name, images, torch.tensor(labels), classes, torch.zeros(len(labels), dtype=torch.bool))


def draw_sheet(tmp_path, domains, **options) -> np.ndarray:
    path = tmp_path / "sheet.png"
    contact_sheet(domains, path, **options)
    with Image.open(path) as sheet:
        assert (sheet.format, sheet.mode) == ("PNG", "RGB")
        return np.array(sheet)


def extent(sheet, colour) -> tuple[int, int, int, int]:
    """Left, top, width and height of what has exactly this colour."""
    y, x = np.nonzero((sheet == np.array(colour)).all(axis=2))
    return int(x.min()), int(y.min()), int(x.max() - x.min() + 1), int(y.max() - y.min() + 1)


def test_one_row_per_class_in_domain_order(tmp_path):
    sheet = draw_sheet(tmp_path, [plain_domain([BLUE, RED, GREEN], [1, 0, 1])], columns=2)
    red, green, blue, empty = (extent(sheet, colour) for colour in (RED, GREEN, BLUE, EMPTY))
    assert {box[2:] for box in (red, green, blue, empty)} == {(64, 64)}
    assert red[0] == blue[0] < green[0] == empty[0]
    assert red[1] == empty[1] < blue[1] == green[1]


def test_column_count_is_limited(tmp_path):
    sheet = draw_sheet(tmp_path, [plain_domain([RED, BLUE], [0, 0])], columns=1)
    assert extent(sheet, RED)[2:] == (64, 64)
    assert not (sheet == np.array(BLUE)).all(axis=2).any()


@pytest.mark.parametrize(("side", "tile"), [((28, 28), (56, 56)), ((64, 48), (48, 64)), ((128, 256), (64, 32))])
def test_tiles_keep_their_shape(tmp_path, side, tile):
    assert extent(draw_sheet(tmp_path, [plain_domain([RED], [0], side)], columns=1), RED)[2:] == tile


def test_pixels_are_enlarged_unsmoothed(tmp_path):
    images = torch.randint(256, (1, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[0, :, 0, 0] = images[0, :, -1, -1] = torch.tensor(RED)
    sheet = draw_sheet(tmp_path, [LabelledDomain("noise", images, torch.tensor([0]), ("only",))], columns=1)
    left, top, *_ = extent(sheet, RED)
    tile = sheet[top : top + 64, left : left + 64]
    assert (tile[::2, ::2] == images[0].permute(1, 2, 0).numpy()).all()
    assert (tile[1::2, 1::2] == tile[::2, ::2]).all()


def test_domains_are_side_by_side_without_overlap(tmp_path):
    domains = [plain_domain([colour], [0], name=f"d{k}") for k, colour in enumerate((RED, GREEN, BLUE))]
    sheet = draw_sheet(tmp_path, domains, columns=3)
    red, green, blue = (extent(sheet, colour) for colour in (RED, GREEN, BLUE))
    assert red[1] == green[1] < blue[1]
    assert red[0] == blue[0] < green[0]
    assert {box[2:] for box in (red, green, blue)} == {(64, 64)}


def test_descriptions_are_written_and_long_names_fit(tmp_path):
    domain = plain_domain([RED], [0], name="a domain", classes=("a class with quite a long name", "b"))
    without = draw_sheet(tmp_path, [domain], columns=1)
    described = draw_sheet(
        tmp_path, [domain], columns=1, descriptions={"a domain": "what it is " * 20, "another": "not here"}
    )
    assert described.shape[0] > without.shape[0]
    assert described.shape[1] > without.shape[1]
    for sheet in (without, described):
        frame = np.ones(sheet.shape[:2], dtype=bool)
        frame[20:-20, 20:-20] = False
        assert (sheet[frame] == 255).all()


@pytest.mark.parametrize(
    ("labels", "classes", "expected"),
    [([0, 1], ("a", "b"), "2 classes"), ([0, 0], ("a", "b"), "1 of 2 classes"), ([0, 0], ("a",), "1 class")],
)
def test_classes_without_images_are_not_counted(tmp_path, monkeypatch, labels, classes, expected):
    written = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, place, text, **how: written.append(text))
    draw_sheet(tmp_path, [plain_domain([RED, BLUE], labels, classes=classes)])
    assert f"2 images · 0 held out · {expected} · 32×32" in written


def test_output_is_deterministic(tmp_path):
    domain = plain_domain([RED, BLUE], [0, 1])
    assert (draw_sheet(tmp_path, [domain]) == draw_sheet(tmp_path, [domain])).all()


def test_mistakes_are_named(tmp_path):
    with pytest.raises(RatpError, match="at least one domain"):
        contact_sheet([], tmp_path / "sheet.png")
    with pytest.raises(RatpError, match="at least one column, got 0"):
        contact_sheet([plain_domain([RED], [0])], tmp_path / "sheet.png", columns=0)
    with pytest.raises(RatpError, match="cannot write"):
        contact_sheet([plain_domain([RED], [0])], tmp_path / "missing" / "sheet.png")


class TestWhatIsThere:
    """``ratp streams show`` overwrites its own sheets and nothing else."""

    @pytest.fixture(autouse=True)
    def _here(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)

    def assert_error(self, *words, expected):
        result = ratp("streams", "show", "demo", *words)
        assert (result.code, result.out) == (2, "")
        for text in expected:
            assert text in result.err

    def test_existing_sheet_is_replaced(self):
        for _ in range(2):
            assert ratp("streams", "show", "demo", "--json").code == 0
        Path("demo.png").rename("kept.png")
        Path("demo.png").symlink_to("kept.png")
        assert ratp("streams", "show", "demo", "--json").code == 0
        assert Path("demo.png").is_symlink()

    def test_other_picture_is_not_replaced(self):
        Image.new("RGB", (8, 8)).save("demo.png")
        before = Path("demo.png").read_bytes()
        for words in ([], ["--out", "demo.png"]):
            self.assert_error(*words, expected=["cannot write demo.png: it exists and", "Move it away", "--out"])
        assert Path("demo.png").read_bytes() == before

    def test_other_file_is_not_replaced(self):
        Path("notes.txt").write_text("mine")
        self.assert_error("--out", "notes.txt", expected=["cannot write notes.txt", "a name in .png"])
        assert Path("notes.txt").read_text() == "mine"

    def test_folder_is_not_replaced(self):
        Path("sheets.png").mkdir()
        self.assert_error(
            "--out",
            "sheets.png",
            expected=["cannot write sheets.png: it exists and", "Move it away"],
        )
