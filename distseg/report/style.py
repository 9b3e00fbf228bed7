"""Style of all pictures of distseg: the import of matplotlib, its settings and the colours.

matplotlib is imported when the first picture is drawn. Figures are made without pyplot, so no
display is needed and the figures of a user's notebook do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

# Palette of Okabe and Ito, which colour-blind readers can distinguish too. A dark brown replaces
# its yellow, which is too pale for lines on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#661100", "#333333")

# Colours of classes that have a natural colour. Their lightness differs, so they can be told apart
# in a grey print too.
NATURAL = {
    "ocean": "#163E6C", "sea": "#163E6C", "water": "#2F6FA8",
    "lake": "#00B4E6", "river": "#00B4E6",
    "land": "#DCD0A0", "soil": "#B08D57", "forest": "#2E6B3E",
    "grass": "#A9C46C", "crop": "#D9B23D",
    "snow": "#F4F7FA", "ice": "#DDEBF2", "cloud": "#FFFFFF",
    "road": "#555555", "building": "#8C2D1B", "urban": "#8C2D1B", "background": "#D9D9D9",
}  # fmt: skip

ERROR = "#D81B60"
UNLABELLED = "#7A7A7A"
INK = "#222222"
FAINT = "#777777"

SETTINGS = {
    "font.family": "sans-serif", "font.size": 10, "text.color": INK,
    "axes.labelcolor": INK, "axes.edgecolor": "#AAAAAA",
    "xtick.color": "#555555", "ytick.color": "#555555",
    "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#E8E8E8",
    "legend.frameon": False, "legend.fontsize": 9,
    "lines.solid_capstyle": "round", "figure.facecolor": "white",
}  # fmt: skip


def need_matplotlib() -> None:
    """Raise an ImportError if matplotlib cannot be imported; the message says how to install it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise ImportError(
            f"pictures need matplotlib, which cannot be imported ({e}): pip install matplotlib"
        ) from e


@contextmanager
def new_figure(output: str | Path, size: tuple[float, float], dpi: int = 150, **options):
    """Yield a new figure, and save it to ``output`` if the block ends without an error.

    Args:
        output: the file to write; its ending chooses the format.
        size: width and height in inches.
        dpi: pixels per inch.
        options: further arguments of ``matplotlib.figure.Figure``.
    """
    need_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    output = Path(output)
    with rc_context(SETTINGS):
        figure = Figure(figsize=size, dpi=dpi, **options)
        yield figure
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=dpi)


def class_colors(classes: Sequence[str], colors: Sequence | None = None) -> np.ndarray:
    """Return one colour per class, (K, 3) uint8.

    Args:
        classes: names of the K classes.
        colors: one colour per class (``#rrggbb``, a name, or three ints in 0..255). None chooses
            natural colours for names such as ocean, and colours of the palette for all others.

    Raises:
        ValueError: the number of colours is not the number of classes.
    """
    from PIL.ImageColor import getrgb

    if colors is not None and len(colors) != len(classes):
        raise ValueError(
            f"{len(colors)} colours do not fit {len(classes)} classes ({', '.join(classes)}): "
            "give one per class, or none"
        )
    free = iter(PALETTE * (len(classes) // len(PALETTE) + 1))
    chosen = (
        colors
        if colors is not None
        else [NATURAL.get(name.lower()) or next(free) for name in classes]
    )
    return np.array([getrgb(c)[:3] if isinstance(c, str) else c for c in chosen], dtype=np.uint8)
