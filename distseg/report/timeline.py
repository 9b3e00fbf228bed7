"""A pipeline's schedule, simulated or measured, as text, as a picture, and as a trace for Perfetto (ui.perfetto.dev).

All start from spans (distseg.pipeline.trace). The name of an action's span begins with F or B, micro-batch and stage
(``F3,0``), as torchgpipe's paper writes F_ij and B_ij.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Sequence

from distseg.pipeline.trace import Span
from distseg.report.style import INK, PALETTE, new_figure
from distseg.report.tables import table

COLORS = {
    "forward": PALETTE[5], "backward": PALETTE[4], "recompute": PALETTE[2], "send": PALETTE[1], "norm-exchange": PALETTE[3], "wait": "#DDDDDD",
}  # fmt: skip
_ACTION = re.compile(r"[FB](\d+),(\d+)")
_ABOVE = ("send", "norm-exchange")  # inside an action: drawn narrower, on top of it


def clock_table(spans: Sequence[Span], cycle: float = 1.0) -> str:
    """A row for each clock cycle, a column for each rank; ``cycle`` is in seconds. An entry stands where its action starts::

        clock  rank 0  rank 1
        -----  ------  ------
            0  F0,0
            1  F1,0    F0,1
    """
    started = {(round(s.start / cycle), s.rank): s.name for s in spans if s.kind in ("forward", "backward")}
    ranks = range(max(rank for _, rank in started) + 1)
    rows = [
        {"clock": clock, **{f"rank {rank}": started.get((clock, rank), "") for rank in ranks}} for clock in range(max(started)[0] + 1)
    ]
    return table(rows)


def short_form(spans: Sequence[Span], cycle: float = 1.0) -> str:
    """A line for each stage, a column for each ``cycle`` seconds; 3 is micro-batch 3's forward pass, 3' its backward pass::

        stage 0  0 1      0' 1'
        stage 1    0 1 0' 1'
    """
    actions = [(*_place(s), s) for s in spans if s.kind in ("forward", "backward")]
    rank_of = {stage: span.rank for _, stage, span in actions}
    lines = []
    for stage in sorted(rank_of):
        text = ""
        for m, _, span in sorted((a for a in actions if a[1] == stage), key=lambda a: a[2].start):
            text = text.ljust(round(span.start / cycle)) + str(m) + ("'" if span.kind == "backward" else "")
        whose = "" if all(rank == s for s, rank in rank_of.items()) else f" (rank {rank_of[stage]})"
        lines.append(f"stage {stage}{whose}  {text}")
    return "\n".join(lines)


def _place(span: Span) -> tuple[int, int]:
    """(micro-batch, stage)."""
    match = _ACTION.match(span.name)
    if not match:
        raise ValueError(f"the name of a {span.kind} span begins with an action such as F3,0, got {span.name!r}")
    return int(match[1]), int(match[2])


def plot_timeline(spans: Sequence[Span], output: str | Path, title: str = "Timeline") -> None:
    """A row for each rank, a box for each span with its micro-batch; of a rank's several stages, the later are hatched.

    Raises:
        ValueError: no span, or one of an unknown kind.
    """
    unknown = {s.kind for s in spans} - set(COLORS)
    if unknown or not spans:
        raise ValueError(f"a timeline needs spans of the kinds {', '.join(COLORS)}, got {', '.join(sorted(unknown)) or 'none at all'}")
    ranks, end = max(s.rank for s in spans) + 1, max(s.end for s in spans)
    width = min(24.0, max(8.0, 0.32 * max(sum(s.rank == rank for s in spans) for rank in range(ranks))))
    with new_figure(output, (width, 0.55 * ranks + 1.4), layout="constrained") as figure:
        axis = figure.subplots()
        for span in sorted(spans, key=lambda s: s.kind in _ABOVE):
            _draw_box(axis, span, first_stage=_first_stage(spans, span.rank), smallest=0.12 * end / width)
        for kind in (kind for kind in COLORS if any(s.kind == kind for s in spans)):
            axis.bar(0, 0, color=COLORS[kind], label=kind)
        axis.set(title=title, xlabel="time [s]", xlim=(0, end * 1.002), ylim=(ranks - 0.5, -0.5))
        axis.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axis.grid(axis="y", visible=False)
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _first_stage(spans: Sequence[Span], rank: int) -> int:
    return min((int(m[2]) for s in spans if s.rank == rank and (m := _ACTION.match(s.name))), default=0)


def _draw_box(axis, span: Span, first_stage: int, smallest: float) -> None:
    """``smallest``: seconds that a digit takes on paper."""
    action = _ACTION.match(span.name)
    height = 0.32 if span.kind in _ABOVE else 0.8
    later = action is not None and int(action[2]) > first_stage
    axis.barh(
        span.rank, span.seconds, height, left=span.start, color=COLORS[span.kind], edgecolor="white", linewidth=0.6, hatch="///" if later else None
    )  # fmt: skip
    if action and span.kind not in ("wait", *_ABOVE) and span.seconds > smallest * len(action[1]):
        color = "white" if span.kind == "recompute" else INK
        box = {"boxstyle": "round,pad=0.1", "facecolor": COLORS[span.kind], "edgecolor": "none"} if later else None
        axis.text(span.start + span.seconds / 2, span.rank, action[1], ha="center", va="center", fontsize=8, color=color, bbox=box)


def trace_events(spans: Sequence[Span], job: int = 0) -> dict:
    """The Chrome trace format: complete events (ph X) in microseconds, a process for the job, a thread for each rank."""
    threads = [
        {"name": "thread_name", "ph": "M", "pid": job, "tid": rank, "args": {"name": f"rank {rank}"}} for rank in sorted({s.rank for s in spans})
    ]
    events = [
        {"name": s.name, "cat": s.kind, "ph": "X", "ts": s.start * 1e6, "dur": s.seconds * 1e6, "pid": job, "tid": s.rank, "args": {"kind": s.kind}}
        for s in sorted(spans, key=lambda s: (s.start, -s.end))  # Perfetto nests what lies inside an earlier span
    ]
    process = {"name": "process_name", "ph": "M", "pid": job, "args": {"name": f"distseg job {job}"}}
    return {"traceEvents": [process, *threads, *events], "displayTimeUnit": "ms"}


def write_trace(spans: Sequence[Span], output: str | Path, job: int = 0) -> None:
    """Open the file in ui.perfetto.dev or chrome://tracing."""
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(trace_events(spans, job)))
