"""Draw docs/images/inside.png, a step on four ranks: `python docs/images/inside.py`.

Ranks 0 and 2 hold the first stage of two tiles, ranks 1 and 3 the second. Boxes are operations, arrows are messages.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import FancyArrowPatch, Rectangle  # noqa: E402

INK, PALE = "#222222", "#999999"
FORWARD, BACKWARD, OTHER = "#4477AA", "#EE6677", "#BBBBBB"
HALO, SUM, STAGE = "#228833", "#AA3377", "#CC7711"

# Lanes from top to bottom: both ranks of stage 0 are neighbours, and so are both of stage 1.
LANES = {1: 3, 0: 2, 2: 1, 3: 0}
HEIGHT, GAP = 5, 9

# Start, length, text, color of the operations of a stage.
FIRST = [
    (0, 8, "read tile", OTHER),
    (11, 9, "conv", FORWARD),
    (23, 9, "norm", FORWARD),
    (35, 9, "conv", FORWARD),
    (84, 9, "conv", BACKWARD),
    (96, 9, "norm", BACKWARD),
    (108, 9, "conv", BACKWARD),
    (120, 9, "update", OTHER),
]
SECOND = [
    (34, 10, "read labels", OTHER),
    (47, 9, "conv", FORWARD),
    (59, 8, "loss", FORWARD),
    (70, 11, "conv", BACKWARD),
    (120, 9, "update", OTHER),
]


def main() -> None:
    figure, axes = plt.subplots(figsize=(13, 4.6))
    axes.set(xlim=(-17, 132), ylim=(-9, 39))
    axes.axis("off")
    for rank, lane in LANES.items():
        stage, tile = rank % 2, rank // 2
        y = GAP * lane
        axes.text(
            -16,
            y + HEIGHT / 2,
            f"rank {rank}\ntile {tile}, stage {stage}",
            va="center",
            fontsize=9,
            color=INK,
        )
        axes.plot((-1, 130), (y + HEIGHT / 2,) * 2, color=PALE, lw=0.6, zorder=0)
        for start, length, text, color in SECOND if stage else FIRST:
            axes.add_patch(Rectangle((start, y), length, HEIGHT, color=color, alpha=0.85, lw=0))
            axes.text(
                start + length / 2,
                y + HEIGHT / 2,
                text,
                ha="center",
                va="center",
                fontsize=8,
                color="white" if color != OTHER else INK,
            )
    for x, text in ((9.5, "halo"), (33.5, "halo"), (94.5, "halo's\ngradient")):
        between(axes, x, 0, 2, HALO, text)
    for x, text in ((21.5, "statistics"), (106.5, "their\ngradient"), (117.8, "")):
        between(axes, x, 0, 2, SUM, text)
    for x, text in ((57.5, "partial sums of the loss"), (119.3, "sum of gradients")):
        between(axes, x, 1, 3, SUM, text)
    for first, second in ((0, 1), (2, 3)):
        message(axes, (44, 0), (46.8, 0), first, second)
        message(axes, (81, 0), (83.8, 0), second, first)
    axes.text(
        46.5, 2.5 * GAP + HEIGHT / 2 - 0.2, "activations", fontsize=8, color=STAGE, va="center"
    )
    axes.text(70.5, 2.5 * GAP + HEIGHT / 2 - 0.2, "send_grad", fontsize=8, color=STAGE, va="center")
    axes.annotate("", (129, -6.5), (0, -6.5), arrowprops={"arrowstyle": "->", "color": PALE})
    axes.text(64, -8.6, "time", fontsize=9, color=PALE, ha="center")
    figure.savefig(
        Path(__file__).with_name("inside.png"), dpi=110, bbox_inches="tight", facecolor="white"
    )


def between(axes, x: float, one: int, other: int, color: str, text: str) -> None:
    """Draw an exchange between two ranks of a stage; ranks of stage 1 are the outer lanes."""
    low, high = sorted(GAP * LANES[rank] + HEIGHT / 2 for rank in (one, other))
    dashed = high - low > GAP
    axes.add_patch(
        FancyArrowPatch(
            (x, low),
            (x, high),
            arrowstyle="<->",
            mutation_scale=9,
            color=color,
            lw=1.3,
            ls=(0, (3, 2)) if dashed else "-",
            shrinkA=0,
            shrinkB=0,
        )
    )
    if dashed:
        axes.text(x, high + 3.2, text, ha="center", fontsize=8, color=color)
    else:
        axes.text(x + 0.8, (low + high) / 2, text, ha="left", va="center", fontsize=8, color=color)


def message(axes, start, end, source: int, target: int) -> None:
    """Draw a message from a stage to another."""
    axes.add_patch(
        FancyArrowPatch(
            (start[0], GAP * LANES[source] + HEIGHT / 2),
            (end[0], GAP * LANES[target] + HEIGHT / 2),
            arrowstyle="->",
            mutation_scale=9,
            color=STAGE,
            lw=1.3,
        )
    )


if __name__ == "__main__":
    main()
