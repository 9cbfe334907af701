"""Write the pictures of the docs: run ``python docs/generate_pictures.py``."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from PIL import Image

from lightning_cp.layout import Documents, SequenceLayout
from lightning_cp.layout.drawing import draw_layouts, draw_timeline
from lightning_cp.layout.sequence import LayoutKind

FOLDER = Path(__file__).parent / "concepts"
PACKED = Documents.from_cu_seqlens([0, 5_600, 19_200, 23_200, 28_000, 32_768])
KINDS: tuple[LayoutKind, ...] = ("contiguous", "zigzag", "balanced")
COLORS = 64
"""Colours of a picture: enough for text with smooth edges, and a third of the bytes of all colours."""


def main() -> None:
    """Draw the layouts of one causal document and of packed ones, and the timelines of two of them."""
    causal = [SequenceLayout(32_768, 4, kind=kind) for kind in KINDS[:2]]
    packed = [SequenceLayout(32_768, 4, kind=kind, documents=PACKED) for kind in KINDS]
    figures = {
        "layouts_causal": draw_layouts(causal),
        "layouts_packed": draw_layouts(packed),
        "timeline": draw_timeline(causal[1]),
        "timeline_packed": draw_timeline(packed[2]),
    }
    for name, figure in figures.items():
        image = BytesIO()
        figure.savefig(image, dpi=120)
        picture = Image.open(image).convert("RGB").quantize(COLORS)
        picture.save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
