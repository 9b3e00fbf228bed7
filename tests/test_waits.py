"""Work that is put off: how much at a time, when it is done at the latest, and what does it earlier."""

from contextlib import contextmanager

import pytest
import torch

from distseg.comm.collective import Alone
from distseg.comm.waits import Ranks, Waits, When, waits_of


def put_off(waits: Waits, done: list, name: str) -> bool:
    return waits.later(lambda: done.append(name))


def test_nothing_is_put_off_by_itself():
    waits = Waits()
    assert not put_off(waits, [], "a")
    waits.finish("W0,0")


def test_one_piece_at_a_time_and_all_in_the_end():
    done, waits = [], Waits()
    with waits.putting_off():
        assert put_off(waits, done, "a") and done == []
        assert put_off(waits, done, "b") and done == ["a"]
    assert done == ["a", "b"]


def test_gradients_that_are_put_off_stop_an_update():
    waits = Waits()
    waits.check_done()
    with waits.putting_off():
        put_off(waits, [], "a")
        with pytest.raises(
            RuntimeError, match="yet .1 are left, and the oldest waits until the next pass begins"
        ):
            waits.check_done()
    waits.check_done()


def test_until_an_action():
    done, waits = [], Waits()
    with waits.putting_off():
        for action in ("W0,1", "W1,1"):
            with waits.until(action):
                for name in "ab":
                    put_off(waits, done, action + name)
        assert done == []
        waits.finish("W1,1")
        assert done == ["W1,1a", "W1,1b"]
        waits.finish("W1,1")
    assert done == ["W1,1a", "W1,1b", "W0,1a", "W0,1b"]


def test_without_an_action_until_the_next_pass():
    done, waits = [], Waits()
    with waits.putting_off():
        put_off(waits, done, "a")
        with waits.until("W0,0"):
            put_off(waits, done, "b")
        waits.finish(None)
        assert done == ["a"]


def test_waits_do_the_oldest_first():
    done, spans, waits = [], [], Waits()

    @contextmanager
    def span(kind, name):
        spans.append((kind, name))
        yield

    waits.span = span
    with waits.putting_off():
        with waits.until("W0,0"):
            put_off(waits, done, "a")
        with waits.until("W1,0"):
            put_off(waits, done, "b")
            put_off(waits, done, "c")
        waits.wait(When(lambda: len(done) == 2))
        assert done == ["a", "b"] and spans == [("weight", "W0,0"), ("weight", "W1,0")]
        waits.finish("W0,0")
        assert done == ["a", "b"]


def test_no_graph_of_what_is_put_off():
    """A wait may come inside a forward pass, where gradients are on."""
    x, found, waits = torch.ones(2, requires_grad=True), [], Waits()

    def note():
        return found.append((2 * x).requires_grad)

    with waits.putting_off():
        waits.later(note)
        with waits.until("W0,0"):
            waits.later(note)
        waits.finish("W0,0")
    assert found == [False, False]


def test_what_failed_puts_nothing_off_for_the_next_step():
    done, waits = [], Waits()
    try:
        with waits.putting_off(), waits.until("W0,0"):
            put_off(waits, done, "a")
            raise KeyError
    except KeyError:
        pass
    assert done == [] and not put_off(waits, done, "b")


def test_two_meshes_in_a_process_do_not_meet():
    """What one puts off, or moves on while it waits, is none of the other's."""
    first, second, moved = Ranks(Alone(), Waits()), Ranks(Alone(), Waits(7.0)), []
    with waits_of(first).putting_off(), waits_of(first).moving(lambda: moved.append(1)):
        put_off(waits_of(first), moved, "a")
        asked = iter([False, False, True])
        waits_of(second).wait(When(lambda: next(asked)))
        assert moved == [] and not put_off(waits_of(second), moved, "b")
    assert (
        moved == ["a"]
        and waits_of(first).timeout == 0.0
        and waits_of(Alone()) is not waits_of(first)
    )


@pytest.mark.parallel(2)
def test_parts_of_a_communicator_wait_as_it_does(comm):
    ranks = Ranks(comm, Waits())
    part = ranks.Split(ranks.rank, 0)
    assert (
        part.waits is ranks.waits
        and (part.size, ranks.size) == (1, 2)
        and ranks.allgather(ranks.rank) == [0, 1]
    )
