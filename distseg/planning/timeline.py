"""Show a pipeline's schedule as text, as a picture, or as a trace for Perfetto (ui.perfetto.dev).

The schedule is a list of spans (distseg.runtime.spans), simulated or measured. The name of an
action's span begins with F, B or W, the micro-batch and the stage (``F3,0``), like F_ij and B_ij in
torchgpipe (Kim et al. 2020).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from distseg.report.style import INK, PALETTE, new_figure
from distseg.runtime.actions import Backward, Forward, Weight
from distseg.runtime.spans import Span

# Colours by kind, in drawing order: kinds that may lie inside another span come after it.
COLORS = {
    "forward": PALETTE[5],
    "backward": PALETTE[4],
    "recompute": PALETTE[2],
    "update": PALETTE[0],
    "wait": "#DDDDDD",
    "weight": "#F4D58D",
    "reduce": PALETTE[6],
    "send": PALETTE[1],
    "norm-exchange": PALETTE[3],
    "halo": PALETTE[7],
    "read": "#999999",
    "scratch": "#8C6D46",
}
_ACTIONS = {action.kind: action for action in (Forward, Backward, Weight)}
ACTION = re.compile(r"[FBW](\d+),(\d+)")
# Kinds that lie inside an action: they are drawn narrower, on top of it.
_ABOVE = ("send", "norm-exchange", "halo", "read", "scratch")


def short_form(spans: Sequence[Span], cycle: float = 1.0) -> str:
    """Return a text with a line per stage and a column per ``cycle`` seconds.

    3 is the forward pass of micro-batch 3, and 3' is its backward pass. 3" is the computation of
    its weight gradients, if the schedule separates that from the backward pass::

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
    """Return (micro-batch, stage) from the name of a span; ``F3,0`` gives (3, 0)."""
    match = ACTION.match(span.name)
    if not match:
        raise ValueError(
            f"a {span.kind} span must have a name that begins with an action such as F3,0 (forward "
            f"pass of micro-batch 3 on stage 0), got {span.name!r}"
        )
    return int(match[1]), int(match[2])


def plot_timeline(
    spans: Sequence[Span],
    output: str | Path,
    title: str = "Timeline",
    rows: Sequence[str] | None = None,
) -> None:
    """Draw a timeline with a row per rank and a box per span, labelled with its micro-batch.

    If a rank has several stages, boxes of all but the first are hatched.

    Args:
        spans: the spans of all ranks.
        output: the path of the picture.
        title: the title of the picture.
        rows: names of the ranks; ``rank 0`` and so on by default.

    Raises:
        ValueError: there is no span, or a span is of an unknown kind.
    """
    unknown = {s.kind for s in spans} - set(COLORS)
    if unknown or not spans:
        raise ValueError(
            f"a timeline needs spans of the kinds {', '.join(COLORS)}, got "
            f"{', '.join(sorted(unknown)) or 'none at all'}"
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
    """Return True if a span belongs to a stage that is not the first stage of its rank.

    Return False if the span's name does not begin with an action such as ``F3,0``.

    Args:
        span: the span.
        first_stage: the lowest stage of each rank.
    """
    action = ACTION.match(span.name)
    return action is not None and int(action[2]) > first_stage[span.rank]


def _alike(
    spans: Sequence[Span], first_stage: Mapping[int, int]
) -> list[tuple[tuple[int, int, bool], list[Span]]]:
    """Group spans that are drawn in one call; return pairs (key, spans) in drawing order.

    The key is (index of the kind in ``COLORS``, rank, True if the stage is not the first of its
    rank).

    Args:
        spans: the spans of all ranks.
        first_stage: the lowest stage of each rank.
    """
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
        [(s.start, s.seconds) for s in spans],
        (rank - height / 2, height),
        facecolor=COLORS[kind],
        edgecolor="white",
        linewidth=0.1 if kind in _ABOVE else 0.6,
        hatch="///" if later else None,
    )


def _write_number(axis, span: Span, later: bool, smallest: float) -> None:
    """Write the index of the micro-batch into the box of a span if the box is wide enough.

    Args:
        axis: the matplotlib axes.
        span: the span that the box stands for.
        later: True if the box is hatched, so that the number needs a background.
        smallest: the width of a digit, in seconds on the time axis.
    """
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
    """Return a trace of spans in the Chrome trace format.

    Spans are complete events (ph X) in microseconds. The trace shows the job as a process and each
    rank as a thread of this process.

    Args:
        spans: the spans of all ranks.
        job: the number of the job, which the trace uses as process id.
        rows: names of the ranks; ``rank 0`` and so on by default.
    """
    ranks = sorted({s.rank for s in spans})
    threads = [
        {"name": "thread_name", "ph": "M", "pid": job, "tid": rank, "args": {"name": name}}
        for rank, name in zip(ranks, _names(rows, ranks))
    ]
    # Perfetto nests a span that lies inside an earlier one, so the longer of two comes first.
    in_order = sorted(spans, key=lambda s: (s.start, -s.end))
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
        for s in in_order
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
    """Write a trace file that ui.perfetto.dev and chrome://tracing can open.

    Args:
        spans: the spans of all ranks.
        output: the path of the file.
        job: the number of the job, which the trace uses as process id.
        rows: names of the ranks; ``rank 0`` and so on by default.
    """
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(trace_events(spans, job, rows)))
