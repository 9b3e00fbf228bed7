"""A pipeline's schedule, simulated or measured, as text, as a picture, and as a trace for Perfetto (ui.perfetto.dev).

All start from spans (distseg.runtime.trace). The name of an action's span begins with F, B or W, micro-batch and stage
(``F3,0``), as torchgpipe's paper writes F_ij and B_ij.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Iterable, Mapping, Sequence

from distseg.report.style import INK, PALETTE, new_figure
from distseg.report.tables import table
from distseg.runtime.actions import Backward, Forward, Weight
from distseg.runtime.trace import Span

COLORS = {  # in the order in which they are drawn: what may lie inside another span comes after it
    "forward": PALETTE[5], "backward": PALETTE[4], "recompute": PALETTE[2], "update": PALETTE[0], "wait": "#DDDDDD", "weight": "#F4D58D", "reduce": PALETTE[6],
    "send": PALETTE[1], "norm-exchange": PALETTE[3], "halo": PALETTE[7], "read": "#999999", "scratch": "#8C6D46",
}  # fmt: skip
_ACTIONS = {action.kind: action for action in (Forward, Backward, Weight)}
ACTION = re.compile(r"[FBW](\d+),(\d+)")
_ABOVE = (
    "send",
    "norm-exchange",
    "halo",
    "read",
    "scratch",
)  # inside an action: drawn narrower, on top of it


def clock_table(spans: Sequence[Span], cycle: float = 1.0) -> str:
    """A row for each clock cycle, a column for each rank; ``cycle`` is in seconds. An entry stands where its action starts::

    clock  rank 0  rank 1
    -----  ------  ------
        0  F0,0
        1  F1,0    F0,1
    """
    started = {(round(s.start / cycle), s.rank): s.name for s in spans if s.kind in _ACTIONS}
    ranks = range(max(rank for _, rank in started) + 1)
    rows = [
        {"clock": clock, **{f"rank {rank}": started.get((clock, rank), "") for rank in ranks}}
        for clock in range(max(started)[0] + 1)
    ]
    return table(rows)


def short_form(spans: Sequence[Span], cycle: float = 1.0) -> str:
    """A line for each stage, a column for each ``cycle`` seconds; 3 is the forward pass of micro-batch 3, 3' its backward pass, 3" what that put off::

    stage 0  0 1      0' 1'
    stage 1    0 1 0' 1'
    """
    actions = [(*_place(s), s) for s in spans if s.kind in _ACTIONS]
    rank_of = {stage: span.rank for _, stage, span in actions}
    lines = []
    for stage in sorted(rank_of):
        text = ""
        for m, _, span in sorted((a for a in actions if a[1] == stage), key=lambda a: a[2].start):
            text = text.ljust(round(span.start / cycle)) + str(_ACTIONS[span.kind](stage, m))
        whose = "" if all(rank == s for s, rank in rank_of.items()) else f" (rank {rank_of[stage]})"
        lines.append(f"stage {stage}{whose}  {text}")
    return "\n".join(lines)


def _place(span: Span) -> tuple[int, int]:
    """(micro-batch, stage)."""
    match = ACTION.match(span.name)
    if not match:
        raise ValueError(
            f"the name of a {span.kind} span begins with an action such as F3,0, got {span.name!r}"
        )
    return int(match[1]), int(match[2])


def plot_timeline(
    spans: Sequence[Span],
    output: str | Path,
    title: str = "Timeline",
    rows: Sequence[str] | None = None,
) -> None:
    """A row for each rank, a box for each span with its micro-batch; of a rank's several stages, the later are hatched.

    Args:
        rows: names of the ranks; ``rank 0`` and so on by default.

    Raises:
        ValueError: no span, or one of an unknown kind.
    """
    unknown = {s.kind for s in spans} - set(COLORS)
    if unknown or not spans:
        raise ValueError(
            f"a timeline needs spans of the kinds {', '.join(COLORS)}, got {', '.join(sorted(unknown)) or 'none at all'}"
        )
    ranks, end = max(s.rank for s in spans) + 1, max(s.end for s in spans)
    boxes = Counter(s.rank for s in spans if s.kind not in _ABOVE)
    width = min(24.0, max(8.0, 0.32 * max(boxes.values(), default=0)))
    first_stage = {rank: _first_stage(spans, rank) for rank in range(ranks)}
    with new_figure(output, (width, 0.55 * ranks + 1.4), layout="constrained") as figure:
        axis = figure.subplots()
        for (_, rank, later), alike in _alike(spans, first_stage):
            _draw_boxes(axis, rank, alike, later)
        for span in spans:
            _write_number(axis, span, _is_later(span, first_stage), smallest=0.12 * end / width)
        for kind in (kind for kind in COLORS if any(s.kind == kind for s in spans)):
            axis.bar(0, 0, color=COLORS[kind], label=kind)
        axis.set(title=title, xlabel="time [s]", xlim=(0, end * 1.002), ylim=(ranks - 0.5, -0.5))
        axis.set_yticks(range(ranks), _names(rows, range(ranks)))
        axis.grid(axis="y", visible=False)
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _names(rows: Sequence[str] | None, ranks: Iterable[int]) -> list[str]:
    return [rows[rank] if rows else f"rank {rank}" for rank in ranks]


def _first_stage(spans: Sequence[Span], rank: int) -> int:
    return min(
        (int(m[2]) for s in spans if s.rank == rank and (m := ACTION.match(s.name))), default=0
    )


def _is_later(span: Span, first_stage: Mapping[int, int]) -> bool:
    """Whether a span is of a later one of its rank's stages."""
    action = ACTION.match(span.name)
    return action is not None and int(action[2]) > first_stage[span.rank]


def _alike(
    spans: Sequence[Span], first_stage: Mapping[int, int]
) -> list[tuple[tuple[int, int, bool], list[Span]]]:
    """Spans that are drawn at once, by (place of their kind among the colours, rank, whether of a later stage)."""
    order = {kind: place for place, kind in enumerate(COLORS)}
    found: dict[tuple[int, int, bool], list[Span]] = {}
    for span in spans:
        found.setdefault((order[span.kind], span.rank, _is_later(span, first_stage)), []).append(
            span
        )
    return sorted(found.items(), key=lambda item: item[0])


def _draw_boxes(axis, rank: int, spans: Sequence[Span], later: bool) -> None:
    kind = spans[0].kind
    height = 0.32 if kind in _ABOVE else 0.8
    axis.broken_barh(
        [(s.start, s.seconds) for s in spans], (rank - height / 2, height), facecolor=COLORS[kind], edgecolor="white",
        linewidth=0.1 if kind in _ABOVE else 0.6, hatch="///" if later else None,
    )  # fmt: skip


def _write_number(axis, span: Span, later: bool, smallest: float) -> None:
    """The micro-batch, in boxes that have room for it. ``smallest``: seconds that a digit takes on paper."""
    action = ACTION.match(span.name)
    if action and span.kind not in ("wait", *_ABOVE) and span.seconds > smallest * len(action[1]):
        color = "white" if span.kind == "recompute" else INK
        box = (
            {"boxstyle": "round,pad=0.1", "facecolor": COLORS[span.kind], "edgecolor": "none"}
            if later
            else None
        )
        axis.text(
            span.start + span.seconds / 2,
            span.rank,
            action[1],
            ha="center",
            va="center",
            fontsize=8,
            color=color,
            bbox=box,
        )


def trace_events(spans: Sequence[Span], job: int = 0, rows: Sequence[str] | None = None) -> dict:
    """The Chrome trace format: complete events (ph X) in microseconds, a process for the job, a thread for each rank."""
    ranks = sorted({s.rank for s in spans})
    threads = [
        {"name": "thread_name", "ph": "M", "pid": job, "tid": rank, "args": {"name": name}}
        for rank, name in zip(ranks, _names(rows, ranks))
    ]
    events = [
        {
            "name": s.name,
            "cat": s.kind,
            "ph": "X",
            "ts": s.start * 1e6,
            "dur": s.seconds * 1e6,
            "pid": job,
            "tid": s.rank,
            "args": {"kind": s.kind},
        }
        for s in sorted(
            spans, key=lambda s: (s.start, -s.end)
        )  # Perfetto nests what lies inside an earlier span
    ]
    process = {
        "name": "process_name",
        "ph": "M",
        "pid": job,
        "args": {"name": f"distseg job {job}"},
    }
    return {"traceEvents": [process, *threads, *events], "displayTimeUnit": "ms"}


def write_trace(
    spans: Sequence[Span], output: str | Path, job: int = 0, rows: Sequence[str] | None = None
) -> None:
    """Open the file in ui.perfetto.dev or chrome://tracing."""
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(trace_events(spans, job, rows)))
