"""Page about one run: a single HTML file that needs no network and no other file.

The records of this module say what the page shows. :func:`run_page` fills the template
``templates/run.html``, and every text is escaped.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from distseg.report.chart import symbol


@dataclass(frozen=True)
class Chart:
    """Line chart of a page, with its title and legend.

    Attributes:
        title: the title.
        svg: the chart (:func:`distseg.report.chart.line_chart`).
        legend: for each line its style, its name and its last value as text.
    """

    title: str
    svg: str
    legend: Sequence[tuple[int, str, str]]


@dataclass(frozen=True)
class Panel:
    """Picture on a page, such as an image, its labels, its prediction or its errors.

    Attributes:
        title: the title.
        source: the picture as a data URI (:func:`data_uri`).
        alt: the text for readers who cannot see the picture.
    """

    title: str
    source: str
    alt: str


@dataclass(frozen=True)
class Pictures:
    """Group of pictures of one image: the image, its labels, its prediction and its errors.

    Attributes:
        name: the name of the image.
        caption: the text below the pictures.
        panels: the pictures, from left to right.
    """

    name: str
    caption: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Evaluated:
    """Part of a page about the evaluation of one split, such as ``test``.

    Attributes:
        split: the split.
        about: a sentence that names the store and the checkpoint.
        scores: the rows of the table of scores, dicts of text or numbers.
        classes: the names of the classes.
        unit: what the confusion matrix counts, ``pixels`` or ``images``.
        confusion: the confusion matrix; empty if there is none.
        images: the rows of the table of images.
        omitted: number of images that the table leaves out.
        pictures: the pictures of the worst and the best images.
        legend: the name and the colour, such as ``#0072b2``, of each class; empty if the pictures
            have no colours of classes.
        notes: sentences on what is missing.
    """

    split: str
    about: str
    scores: Sequence[Mapping]
    classes: Sequence[str]
    unit: str
    confusion: Sequence[Sequence[int]]
    images: Sequence[Mapping]
    omitted: int = 0
    pictures: Sequence[Pictures] = ()
    legend: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    """Content that every page has, which the template ``base.html`` shows.

    Attributes:
        name: the title.
        summary: a sentence below the title.
        figures: (label, value) of the most important numbers.
        facts: (label, value) of each fact about the machine, such as versions.
        settings: for each section a list of (name, value, True if it is not the default).
        notes: sentences on what is missing.
    """

    name: str
    summary: str
    figures: Sequence[tuple[str, str]]
    facts: Sequence[tuple[str, str]]
    settings: Mapping[str, Sequence[tuple[str, str, bool]]]
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class RunPage(Page):
    """Content of the page of a run.

    Attributes:
        charts: the curves.
        evaluations: an entry for each evaluated split.
    """

    charts: Sequence[Chart]
    evaluations: Sequence[Evaluated]


def run_page(page: RunPage) -> str:
    """Return the page of a run as HTML text."""
    return rendered("run.html", page)


def rendered(template: str, page: Page) -> str:
    """Fill a template with the content of a page, and return it as HTML text.

    Args:
        template: the name of a file in ``templates``, which extends ``base.html``.
        page: the record that the template shows as ``page``.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # torch needs it too
    from markupsafe import Markup

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(_template),
    )
    environment.filters.update(svg=Markup, cell=cell, share=_share, symbol=_symbol, head=_head)
    return environment.get_template(template).render(page=page)


def _template(name: str) -> str:
    return files("distseg.report").joinpath("templates", name).read_text(encoding="utf-8")


def settings_beside(config: Mapping, default: Mapping) -> dict[str, list[tuple[str, str, bool]]]:
    """Return, for each section, a list of (name, value, True if it differs from the default).

    Args:
        config: the settings by section, as in a manifest.
        default: the default settings.
    """

    def text(value) -> str:
        return "" if value is None else str(value)

    return {
        section: [
            (name, text(value) or "–", text(value) != text(default.get(section, {}).get(name)))
            for name, value in fields.items()
        ]
        for section, fields in config.items()
        if isinstance(fields, Mapping)
    }


def data_uri(pixels: np.ndarray, palette: np.ndarray | None = None) -> str:
    """Return a picture as a data URI: JPEG for colours, PNG for a palette.

    Args:
        pixels: colours (H, W, 3) uint8, or numbers of the palette's colours (H, W) uint8.
        palette: colours (n, 3) uint8; None if ``pixels`` are colours.
    """
    from PIL import Image

    picture, kind = Image.fromarray(np.ascontiguousarray(pixels)), "jpeg"
    if palette is not None:
        picture.putpalette(palette.tobytes())
        kind = "png"
    written = io.BytesIO()
    picture.save(written, kind, quality=88, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(written.getvalue()).decode('ascii')}"


def cell(value: object) -> str:
    """Return a value of a table as text: four decimals for scores, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _head(name: str) -> str:
    """Return the name of a column as text: ``mean_iou`` is "mean IoU"."""
    spaced = re.sub(r"^(mean|network|colour)_(boundary(?=_))?_?", r"\1 \2 ", name)
    return re.sub(r"\biou\b", "IoU", re.sub(r"\bf1\b", "F1", " ".join(spaced.split())))


def _symbol(style: int) -> str:
    """Return the symbol that marks a line in the legend of a chart, as an SVG element."""
    return f'<g class="mark s{style % 8}">{symbol(style, 11, 6)}</g>'


def _share(count: int, row: Sequence[int]) -> float:
    """Return ``count`` divided by the sum of ``row``; 0 if the sum is 0."""
    return count / sum(row) if sum(row) else 0.0
