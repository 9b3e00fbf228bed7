"""Draw docs/images/idea.png, the picture of the idea in the README: `python docs/images/idea.py`."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import FancyArrowPatch, Rectangle  # noqa: E402

INK, PALE = "#222222", "#999999"
RANKS = ["#4477AA", "#EE6677", "#228833", "#CCBB44"]
GRADIENT = "#AA3377"


def main() -> None:
    figure, axes = plt.subplots(figsize=(11, 4.1))
    axes.set(xlim=(0, 110), ylim=(0, 41), aspect="equal")
    axes.axis("off")
    draw_samples(axes)
    draw_tiles(axes)
    draw_stages(axes)
    text(
        axes,
        55,
        2.2,
        "the sum of all ranks' gradients is the gradient of the serial program",
        12,
        GRADIENT,
    )
    figure.savefig(
        Path(__file__).with_name("idea.png"), dpi=110, bbox_inches="tight", facecolor="white"
    )


def draw_samples(axes) -> None:
    """Draw two groups of ranks, each with images of its own."""
    title(axes, 14, "data: sample groups")
    for row, group in enumerate((0, 1)):
        y = 23 - 15 * row
        for k in range(3):
            box(axes, 5 + 1.6 * k, y - 0.6 * k, 9, 9, "white", INK)
        text(axes, 12.7, y + 3.2, f"group {group}", 9)
    arrow(axes, (20.5, 24), (20.5, 14), GRADIENT, both=True)
    text(axes, 21.3, 19, "sum of\ngradients", 8.5, GRADIENT, "left")


def draw_tiles(axes) -> None:
    """Draw an image in four tiles, one of them with its halo, and what tiles exchange."""
    title(axes, 52, "one image: tiles")
    arrow(axes, (29.5, 20), (35, 20), PALE)
    for k in range(4):
        x, y = 38 + 14 * (k % 2), 20 - 13 * (k // 2)
        box(axes, x, y, 14, 13, RANKS[k], "white", 0.75)
        text(axes, x + 9, y + 4.2, f"rank {k}", 9.5, "white")
    axes.add_patch(Rectangle((38, 17), 17, 16, fill=False, ec=INK, lw=1.4, ls="--"))
    text(axes, 38, 34.2, "tile and its halo", 8.5, INK, "left")
    arrow(axes, (49.5, 23), (54.5, 23), INK, both=True)
    arrow(axes, (42, 22.6), (42, 17.4), INK, both=True)
    text(axes, 67.2, 24.5, "halo rows,\nstatistics\nof norms", 8.5, INK, "left")


def draw_stages(axes) -> None:
    """Draw a U-Net whose layers are cut into two stages, and the skips between them."""
    title(axes, 93, "one network: stages")
    arrow(axes, (78, 20), (82, 20), PALE)
    heights = (18, 13, 8, 5, 8, 13, 18)
    for k, height in enumerate(heights):
        box(
            axes,
            83.5 + 3.4 * k,
            20 - height / 2,
            2,
            height,
            RANKS[0] if k < 4 else RANKS[1],
            "white",
            0.75,
        )
    for k, y in ((1, 27.5), (2, 25)):
        arrow(axes, (84.5 + 3.4 * k, y), (84.5 + 3.4 * (6 - k), y), INK)
    text(axes, 88.5, 7.3, "stage 0", 9, RANKS[0])
    text(axes, 102, 7.3, "stage 1", 9, RANKS[1])
    arrow(axes, (92, 7.4), (98, 7.4), INK)


def title(axes, x: float, words: str) -> None:
    text(axes, x, 38.5, words, 12)


def text(
    axes, x: float, y: float, words: str, size: float, colour: str = INK, side: str = "center"
) -> None:
    axes.text(x, y, words, fontsize=size, color=colour, ha=side, va="center")


def box(
    axes, x: float, y: float, width: float, height: float, face: str, edge: str, alpha: float = 1
) -> None:
    axes.add_patch(Rectangle((x, y), width, height, fc=face, ec=edge, lw=1.2, alpha=alpha))


def arrow(axes, start, end, colour: str, both: bool = False) -> None:
    style = "<|-|>" if both else "-|>"
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=11, color=colour, lw=1.4)
    )


if __name__ == "__main__":
    main()
