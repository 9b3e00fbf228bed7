"""The cases of a test that the default suite runs: so many that every pair of values of its parameters occurs.

    @pytest.mark.covering(2)         # all pairs of values of two parameters, the number of ranks among them
    @pytest.mark.covering(1)         # all values of each parameter
    @pytest.mark.covering(cases=60)  # 60 cases, drawn by a fixed seed

The other cases are marked ``slow``: ``make test`` leaves them out, ``make test-all`` runs them as well. Few faults need three
values at once, so pairs find nearly all that the full product finds, in a fraction of its time.
"""

import random
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

import pytest
from mpirunner.marks import ranks_of

Case = Mapping[str, Hashable]

# Each number of ranks starts as many processes, for seconds each. The default suite has 1 to 4 ranks, and the tests that need one other number.
SELDOM = (6, 8, 9)


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "slow: left out unless `-m ''` is given, as `make test-all` does"
    )
    config.addinivalue_line(
        "markers",
        "covering(strength=0, cases=0): all combinations of so many values, and so many cases more, are not slow",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest's own hook deselects by -m
def pytest_collection_modifyitems(items):
    mark_slow(items)


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark those cases of tests slow that are not chosen. A case that is named on the command line is the only one of its test, and chosen."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        usual = [item for item in cases if ranks_of(item) not in SELDOM] or cases
        if (mark := cases[0].get_closest_marker("covering")) is not None:
            kept = chosen(
                [_values(item) for item in usual],
                *mark.args,
                **mark.kwargs,
                seed=name.rpartition("/")[2],
            )
            usual = [usual[number] for number in kept]
        for item in {*cases} - {*usual}:
            item.add_marker("slow")


def _values(item: pytest.Item) -> Case:
    """Return the values of a case's parameters."""
    return {
        name: value if name == "ranks" else (type(value), _hashable(value))
        for name, value in item.callspec.params.items()
    }


def _hashable(value) -> Hashable:
    """Return the value, or its identity where it holds a list or a dict: the cases of a test share such a value."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def chosen(every: Sequence[Case], strength: int = 0, cases: int = 0, seed: str = "") -> set[int]:
    """Return the numbers of cases in which all combinations of ``strength`` values occur that occur in any case, and of ``cases`` more.

    The cases are chosen greedily: the next one is a case with the most combinations that no earlier one has; among several, one
    on the fewest ranks. What is left open is decided by ``seed``, so the choice is the same in every run.
    """
    order = random.Random(seed).sample(range(len(every)), len(every))
    wanted = {
        number: _combinations(every[number], strength)
        for number in sorted(order, key=lambda number: every[number].get("ranks", 1))
    }
    kept: set[int] = set()
    while any(wanted.values()):
        best = max(wanted, key=lambda number: len(wanted[number]))
        kept.add(best)
        found = wanted[best]
        wanted = {number: those - found for number, those in wanted.items()}
    return kept | set([number for number in order if number not in kept][:cases])


def _combinations(case: Case, strength: int) -> set:
    """Return the combinations of ``strength`` parameters with their values; of a case with fewer parameters, all of them."""
    return set(combinations(sorted(case.items()), min(strength, len(case)))) if strength else set()
