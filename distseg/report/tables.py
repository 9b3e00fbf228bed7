"""Formats tables of results, for a terminal and for a markdown page.

Rows are dicts. A column of numbers is aligned at the right. All its floats have the same number of
decimals if each of them then shows at least two digits::

    model             parameters  halo  time [s]
    ---------------  -----------  ----  --------
    summit-small      72,301,856   190      1.25
    summit-medium-1  232,687,904     -     10.30
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

Rows = Sequence[Mapping[str, Any]]

MISSING = "-"
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)? ?[^\s\d]{0,6}")  # also 12.3 ms, 45%, 1.9x


def table(rows: Rows, columns: Sequence[str] | None = None) -> str:
    """Return a table as aligned text, with a line below its header.

    Args:
        rows: dicts with values by column name; a missing value is shown as ``-``.
        columns: the columns and their order; by default all keys in order of appearance.
    """
    names, cells, rights = _layout(rows, columns)
    if not names:
        return "(no rows)"
    widths = [max(map(len, column)) for column in zip(names, *cells)]
    lines = [names, ["-" * w for w in widths], *cells]
    return "\n".join(
        "  ".join(_pad(c, w, r) for c, w, r in zip(line, widths, rights)).rstrip() for line in lines
    )


def folded_table(rows: Rows, width: int = 100) -> str:
    """Return a table as text; columns that do not fit into ``width`` follow in further tables.

    Each table begins with the first column. Columns without any value are left out.

    Args:
        rows: dicts with values by column name; a missing value is shown as ``-``.
        width: the largest number of characters of a line.
    """
    names = dict.fromkeys(key for row in rows for key in row if row[key] is not None)
    first, *rest = names or [""]
    folds = [[first]]
    for name in rest:
        wider = table(rows, [*folds[-1], name])
        if len(folds[-1]) > 1 and max(map(len, wider.splitlines())) > width:
            folds.append([first])
        folds[-1].append(name)
    return "\n\n".join(table(rows, columns) for columns in folds)


def _layout(
    rows: Rows, columns: Sequence[str] | None
) -> tuple[list[str], list[list[str]], list[bool]]:
    names = list(columns or dict.fromkeys(key for row in rows for key in row))
    texts = [format_column([row.get(name) for row in rows]) for name in names]
    rights = [all(t == MISSING or _NUMBER.fullmatch(t) for t in column) for column in texts]
    return names, [list(cells) for cells in zip(*texts)], rights


def _pad(text: str, width: int, right: bool) -> str:
    return text.rjust(width) if right else text.ljust(width)


def format_column(values: Sequence[Any]) -> list[str]:
    """Return the cells of a column as text, with equal numbers of decimals if this is possible.

    All floats get the number of decimals with which the largest shows four significant digits, if
    the smallest that is not 0 then shows at least two. Otherwise each float is formatted by
    :func:`format_value`. Other values are always formatted by :func:`format_value`.
    """
    sizes = [abs(v) for v in values if _is_finite_float(v) and v]
    decimals = max(0, 3 - math.floor(math.log10(max(sizes)))) if sizes else 0
    common = bool(sizes) and max(sizes) < 1e6 and min(sizes) >= 10.0 ** (1 - decimals)
    return [
        f"{v:,.{decimals}f}" if common and _is_finite_float(v) else format_value(v) for v in values
    ]


def format_value(value: Any) -> str:
    """Return the value of one cell of a table as text.

    Thousands are separated by commas. Floats from 10,000 to 1e9 have no decimals, all others have
    four significant digits. None and NaN become ``-``, and booleans become ``yes`` or ``no``.
    """
    if value is None or value != value:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return f"{value:,}"
    if isinstance(value, Real):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
    return str(value)


def _is_finite_float(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, Integral) and math.isfinite(value)
