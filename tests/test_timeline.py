"""Spans as collected, and a schedule as text, picture and trace."""

import json

import pytest

from distseg.planning.timeline import plot_timeline, short_form, trace_events, write_trace
from distseg.runtime.partition import OUTPUT, Edge
from distseg.runtime.schedule import orders, v_placement
from distseg.runtime.simulator import simulate
from distseg.runtime.spans import NoTrace, Span, Trace


def spans(name: str, placement: tuple[int, ...], m: int, **costs) -> tuple[Span, ...]:
    edges = [Edge(OUTPUT, s, s + 1) for s in range(len(placement) - 1)]
    return simulate(
        orders(name, placement, m),
        edges,
        **{"forward": 1.0, "backward": 1.0, **costs},
        placement=placement,
    ).spans


def test_trace_collects():
    ticks = iter([10.0, 11.0, 11.5, 14.0, 15.0])
    trace = Trace(rank=3, clock=lambda: next(ticks))
    with trace.span("forward", "F0,3"):
        with trace.span("norm-exchange", "enc0_norm0"):
            pass
    assert trace.spans == [
        Span(3, "norm-exchange", "enc0_norm0", 1.5, 4.0),
        Span(3, "forward", "F0,3", 1.0, 5.0),
    ]
    assert trace.spans[1].seconds == 4.0


def test_a_span_that_fails_is_collected():
    trace = Trace()
    with pytest.raises(KeyError):
        with trace.span("send", "x"):
            raise KeyError
    assert [s.kind for s in trace.spans] == ["send"]


def test_spans_are_ranges_of_nvidias_profilers():
    calls, numbers = [], iter([7, 8])

    class Ranges:
        def range_start(self, text):
            calls.append(text)
            return next(numbers)

        def range_end(self, number):
            calls.append(number)

    trace = Trace(ranges=Ranges())
    waiting = trace.span("wait", "sum")
    waiting.__enter__()
    with trace.span("forward", "F0,0"):
        waiting.__exit__(None, None, None)  # a message may end while something else runs
    assert calls == ["wait sum", "forward F0,0", 7, 8]


def test_no_trace():
    trace = NoTrace()
    with trace.span("forward", "F0,0"), trace.span("wait", "x"):
        pass
    assert not trace.spans


def test_short_form():
    expected = """
stage 0  0 1    0'   1'
stage 1    0 0' 1 1'"""
    assert short_form(spans("1f1b", (0, 1), 2, forward=2.0, backward=3.0)) == expected[1:]


def test_gradients_of_weights_in_tables():
    found = spans("zb-h1", (0, 1), 2, forward=3.0, backward=3.0, weight=3.0)
    assert short_form(found).splitlines() == [
        """stage 0  0  1     0' 0" 1' 1\"""",
        """stage 1     0  0' 1  1' 0" 1\"""",
    ]


def test_short_form_of_a_v_names_the_ranks():
    assert short_form(spans("gpipe", v_placement(2), 1, forward=2.0, backward=3.0)) == "\n".join(
        [
            "stage 0 (rank 0)  0           0'",
            "stage 1 (rank 1)    0      0'",
            "stage 2 (rank 0)      0 0'",
        ]
    )


def test_spans_of_other_things_have_no_place_in_a_text():
    assert (
        short_form([Span(0, "wait", "x", 0, 1), Span(0, "forward", "F0,0 tile 2", 1, 2)])
        == "stage 0   0"
    )
    with pytest.raises(ValueError, match="such as F3,0 .*, got 'layer'"):
        short_form([Span(0, "forward", "layer", 0, 1)])


def test_picture(tmp_path):
    others = [
        Span(0, "wait", "x", 3, 4),
        Span(1, "norm-exchange", "norm", 2, 2.5),
        Span(2, "send", "x", 5, 6),
    ]
    plot_timeline(
        [*spans("1f1b", v_placement(3), 4, recompute=1.0), *others], tmp_path / "v.png", title="V"
    )
    assert (tmp_path / "v.png").stat().st_size > 10_000

    import matplotlib.image

    picture = matplotlib.image.imread(tmp_path / "v.png")
    assert (
        len(
            {
                tuple(pixel)
                for pixel in (picture[::4, ::4, :3].reshape(-1, 3) * 255).round().tolist()
            }
        )
        > 6
    )


def test_no_picture_of_nothing(tmp_path):
    with pytest.raises(ValueError, match="got none at all"):
        plot_timeline([], tmp_path / "v.png")
    with pytest.raises(ValueError, match="got sleep"):
        plot_timeline([Span(0, "sleep", "z", 0, 1)], tmp_path / "v.png")


def test_trace_json(tmp_path):
    write_trace(spans("gpipe", (0, 1), 2), tmp_path / "deep" / "trace.json", job=7)
    events = json.loads((tmp_path / "deep" / "trace.json").read_text())["traceEvents"]
    named = {(e["name"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert named == {
        ("process_name", None): "distseg job 7",
        ("thread_name", 0): "rank 0",
        ("thread_name", 1): "rank 1",
    }
    timed = [e for e in events if e["ph"] == "X"]
    assert len(timed) == 8 and {e["pid"] for e in timed} == {7}
    assert {
        "name": "F0,1",
        "cat": "forward",
        "ph": "X",
        "ts": 1e6,
        "dur": 1e6,
        "pid": 7,
        "tid": 1,
        "args": {"kind": "forward"},
    } in timed


def test_outer_spans_come_first():
    """Perfetto nests a span in the one that began before it."""
    inner, outer = Span(0, "wait", "x", 1.0, 1.5), Span(0, "forward", "F0,0", 1.0, 2.0)
    assert [e["name"] for e in trace_events([inner, outer])["traceEvents"] if e["ph"] == "X"] == [
        "F0,0",
        "x",
    ]
