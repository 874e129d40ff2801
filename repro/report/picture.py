"""A still figure in fewer pixels and colours, for a checkout."""

from __future__ import annotations

import io

from PIL import Image

PIXELS = 864  # across
COLOURS = 128
FLAT = 0.002  # a colour of so large a part of the picture is kept, however near another one is
APART = 48  # of 255, in the channel that differs most: other colours are kept if so far from those before
GREYS = tuple((level, level, level) for level in (0, 89, 130, 170, 212, 255))  # words and axes, and their edges


def small_picture(png: bytes) -> bytes:
    """The picture at most `PIXELS` wide and in at most `COLOURS` colours, if that makes it smaller.

    The colours are the most frequent ones of the whole picture, exactly, so that lines and areas keep theirs; those in
    between, along the edges of letters and lines, become the nearest of them.
    """
    image = Image.open(io.BytesIO(png))
    if image.mode == "P" and image.width <= PIXELS and len(image.getcolors()) <= COLOURS:
        return png
    image = image.convert("RGB")
    colours = frequent_colours(image)
    if image.width > PIXELS:
        height = round(image.height * PIXELS / image.width)
        image = image.resize((PIXELS, height), Image.Resampling.LANCZOS)
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for colour in colours for part in colour] + [*colours[0]] * (256 - len(colours)))
    buffer = io.BytesIO()
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(buffer, format="png", optimize=True)
    return min(png, buffer.getvalue(), key=len)


def frequent_colours(image: Image.Image) -> list[tuple[int, int, int]]:
    """Up to `COLOURS` colours of an RGB picture: the greys of its words, and the most frequent others, which are flat
    areas or stand apart from all before."""
    pixels = image.width * image.height
    counted = sorted(image.getcolors(pixels), reverse=True)
    chosen = list(GREYS)
    for count, colour in counted:
        if len(chosen) == COLOURS:
            break
        apart = min((max(abs(a - b) for a, b in zip(colour, other, strict=True)) for other in chosen), default=255)
        if colour not in chosen and (count >= FLAT * pixels or apart >= APART):
            chosen.append(colour)
    return chosen
