"""Draws a contact sheet: one block of samples per domain, one row per class."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ratp._core.files import write_bytes
from ratp.errors import RatpError

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from ratp.data.domain import LabelledDomain

_PAPER, _INK, _FAINT, _EMPTY = "#ffffff", "#1b1f24", "#6a737d", "#f0f2f4"
_TILE = 64  # side of a tile; smaller images are enlarged by a whole factor, larger ones reduced
_GAP = 3
_MARGIN = 32
_TITLE = 22
_TEXT = 14
_MARK = ("Software", "ratp streams show")  # a text in the file that identifies it as a contact sheet
_HEAD = 256  # the first bytes of a file, which contain the mark


def contact_sheet(
    domains: Sequence[LabelledDomain], path: Path, columns: int = 10, *, descriptions: Mapping[str, str] | None = None
) -> None:
    """Writes a PNG with the first images of every class of every domain, and the given descriptions of domains."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    if not domains:
        raise RatpError("a contact sheet needs at least one domain.")
    if columns < 1:
        raise RatpError(f"a contact sheet needs at least one column, got {columns}.")
    blocks = [_block(domain, columns, (descriptions or {}).get(domain.name)) for domain in domains]
    across = math.ceil(math.sqrt(len(blocks)))
    width, height = max(block.width for block in blocks), max(block.height for block in blocks)
    down = math.ceil(len(blocks) / across)
    sheet = Image.new("RGB", (_MARGIN + across * (width + _MARGIN), _MARGIN + down * (height + _MARGIN)), _PAPER)
    for k, block in enumerate(blocks):
        y, x = divmod(k, across)
        sheet.paste(block, (_MARGIN + x * (width + _MARGIN), _MARGIN + y * (height + _MARGIN)))
    file, about = io.BytesIO(), PngInfo()
    about.add_text(*_MARK)
    sheet.save(file, "PNG", pnginfo=about)
    write_bytes(Path(os.path.realpath(path)), file.getvalue())


def check_sheet(path: Path) -> None:
    """Refuses a path that is not a PNG, or an existing file that is not a contact sheet."""
    if path.suffix.lower() != ".png":
        raise RatpError(f"cannot write {path}: a contact sheet is a PNG image. Choose a name in .png with --out.")
    if path.exists() and not _is_sheet(path):
        raise RatpError(
            f"cannot write {path}: it exists and is not a contact sheet that ratp wrote. Move it away, or "
            "choose another name with --out."
        )


def _is_sheet(path: Path) -> bool:
    """Whether a file begins like those written here."""
    try:
        with path.open("rb") as file:
            return "\0".join(_MARK).encode() in file.read(_HEAD)
    except OSError:
        return False


def _block(domain: LabelledDomain, columns: int, description: str | None) -> Image.Image:
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    title_font = ImageFont.truetype(folder / "DejaVuSans-Bold.ttf", _TITLE)
    text_font = ImageFont.truetype(folder / "DejaVuSans.ttf", _TEXT)
    lines = [*([description] if description else []), _counts(domain)]
    names = math.ceil(max(text_font.getlength(name) for name in domain.classes)) + 12
    tile_width, tile_height = _tile_size(domain.images)
    head = _TITLE + 12 + len(lines) * (_TEXT + 7) + 10
    width = max(
        names + columns * (tile_width + _GAP) - _GAP,
        math.ceil(title_font.getlength(domain.name)),
        *(math.ceil(text_font.getlength(line)) for line in lines),
    )
    block = Image.new("RGB", (width, head + len(domain.classes) * (tile_height + _GAP) - _GAP), _PAPER)
    draw = ImageDraw.Draw(block)
    draw.text((0, _TITLE), domain.name, fill=_INK, font=title_font, anchor="ls")
    for k, line in enumerate(lines):
        draw.text((0, _TITLE + 12 + k * (_TEXT + 7) + _TEXT), line, fill=_FAINT, font=text_font, anchor="ls")
    labels = domain.labels.cpu()
    for label, name in enumerate(domain.classes):
        y = head + label * (tile_height + _GAP)
        draw.text((names - 12, y + tile_height / 2), name, fill=_FAINT, font=text_font, anchor="rm")
        members = (labels == label).nonzero().flatten()[:columns].tolist()
        for column in range(columns):
            x = names + column * (tile_width + _GAP)
            if column < len(members):
                block.paste(_tile(domain.images[members[column]], (tile_width, tile_height)), (x, y))
            else:
                draw.rectangle([x, y, x + tile_width - 1, y + tile_height - 1], fill=_EMPTY)
    return block


def _counts(domain: LabelledDomain) -> str:
    height, width = domain.images.shape[2:]
    shown, known = len(set(domain.labels.tolist())), len(domain.classes)
    classes = f"{shown} of {known}" if shown < known else f"{known}"
    parts = [f"{len(domain):,} images", f"{classes} class{'es' * (known > 1)}", f"{width}×{height}"]
    if domain.held_out is not None:
        parts.insert(1, f"{int(domain.held_out.sum()):,} held out")
    return " · ".join(parts)


def _tile_size(images: Tensor) -> tuple[int, int]:
    height, width = images.shape[2:]
    factor = _TILE / max(height, width)
    factor = math.floor(factor) if factor >= 1 else factor
    return max(1, round(width * factor)), max(1, round(height * factor))


def _tile(image: Tensor, size: tuple[int, int]) -> Image.Image:
    from PIL import Image

    tile = Image.fromarray(image.permute(1, 2, 0).cpu().contiguous().numpy())
    enlarged = size[0] >= tile.width
    return tile.resize(size, Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS)
