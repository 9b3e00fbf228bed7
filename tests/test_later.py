"""Work that is put off: how much at a time, when it is done at the latest, and what does it earlier."""

from contextlib import contextmanager, nullcontext

import torch

from distseg.comm import collective, later
from distseg.comm.collective import When, wait
from distseg.comm.later import finish, putting_off, until


def put_off(done: list, name: str) -> bool:
    return later.later(lambda: done.append(name))


def test_nothing_is_put_off_by_itself():
    assert not put_off([], "a")
    finish("W0,0")


def test_one_piece_at_a_time_and_all_in_the_end():
    done = []
    with putting_off():
        assert put_off(done, "a") and done == []
        assert put_off(done, "b") and done == ["a"]
    assert done == ["a", "b"]


def test_until_an_action():
    done = []
    with putting_off():
        for action in ("W0,1", "W1,1"):
            with until(action):
                for name in "ab":
                    put_off(done, action + name)
        assert done == []
        finish("W1,1")
        assert done == ["W1,1a", "W1,1b"]
        finish("W1,1")
    assert done == ["W1,1a", "W1,1b", "W0,1a", "W0,1b"]


def test_waits_do_the_oldest_first():
    done, spans = [], []

    @contextmanager
    def span(kind, name):
        spans.append((kind, name))
        yield

    collective.watch_waits(span)
    try:
        with putting_off():
            with until("W0,0"):
                put_off(done, "a")
            with until("W1,0"):
                put_off(done, "b")
                put_off(done, "c")
            wait(When(lambda: len(done) == 2))
            assert done == ["a", "b"] and spans == [("weight", "W0,0"), ("weight", "W1,0")]
            finish("W0,0")
            assert done == ["a", "b"]
    finally:
        collective.watch_waits(lambda kind, name: nullcontext())


def test_no_graph_of_what_is_put_off():
    """A wait may come inside a forward pass, where gradients are on."""
    x, found = torch.ones(2, requires_grad=True), []
    with putting_off():
        later.later(lambda: found.append((2 * x).requires_grad))
        with until("W0,0"):
            later.later(lambda: found.append((2 * x).requires_grad))
        finish("W0,0")
    assert found == [False, False]


def test_what_failed_puts_nothing_off_for_the_next_step():
    done = []
    try:
        with putting_off(), until("W0,0"):
            put_off(done, "a")
            raise KeyError
    except KeyError:
        pass
    assert done == [] and not put_off(done, "b")
