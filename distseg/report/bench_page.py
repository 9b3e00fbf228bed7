"""Page about measurements of a machine: a single HTML file that needs no other file.

The records of this module say what the page shows. :func:`bench_page` fills the template
``templates/bench.html``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distseg.report.page import Page, Panel, rendered


@dataclass(frozen=True)
class StudyPart:
    """Part of the page about one kind of measurement.

    Attributes:
        title: the title.
        about: a text about the content of the picture and the table.
        facts: a text about the measurement: network, images, number type, ranks.
        columns: the names of the table's columns.
        rows: the cells of each row as text.
        commands: the commands that repeat the measurement.
        picture: the picture; None if there is none.
        notes: sentences on what is missing.
    """

    title: str
    about: str
    facts: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    commands: Sequence[str]
    picture: Panel | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class BenchPage(Page):
    """Content of the page about measurements of ``distseg bench``.

    Attributes:
        studies: the kinds of measurement.
    """

    studies: Sequence[StudyPart]


def bench_page(page: BenchPage) -> str:
    """Return the page about measurements as HTML text."""
    return rendered("bench.html", page)
