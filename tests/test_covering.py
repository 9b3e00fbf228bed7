"""The default suite's cases: all pairs of values, few cases, the same in every run."""

from itertools import combinations, product

import pytest
from covering import chosen
from test_runner import pytest_on, verdicts

SETTINGS = {"ranks": 4, "schedule": 3, "norm": 4, "recompute": 3}
EVERY = [dict(zip(SETTINGS, values)) for values in product(*map(range, SETTINGS.values()))]


def pairs(cases) -> set:
    return {pair for case in cases for pair in combinations(case.items(), 2)}


def test_all_pairs_in_few_cases():
    kept = chosen(EVERY, 2)
    assert pairs(EVERY[number] for number in kept) == pairs(EVERY)
    assert 16 <= len(kept) <= 20  # of 144; 16 pairs of ranks and norm


def test_all_values_in_as_many_cases_as_the_longest_parameter_has_values():
    assert len(chosen(EVERY, 1)) == 4


def test_pairs_that_occur_in_no_case_are_not_asked_for():
    allowed = [case for case in EVERY if case["ranks"] or not case["norm"]]
    assert pairs(allowed[number] for number in chosen(allowed, 2)) == pairs(allowed)


def test_the_choice_is_that_of_the_seed():
    assert (
        chosen(EVERY, cases=10, seed="a")
        == chosen(EVERY, cases=10, seed="a")
        != chosen(EVERY, cases=10, seed="b")
    )
    assert len(chosen(EVERY, cases=10)) == 10


SUITE = """
import pytest

@pytest.mark.covering(1)
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
def test_thinned(a, b):
    pass

@pytest.mark.slow
def test_long():
    pass

@pytest.mark.parallel([1, 2])
@pytest.mark.covering(1)
@pytest.mark.parametrize("a", range(2))
def test_on_ranks(comm, a):
    pass
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_it.py").write_text(SUITE)
    (folder / "pytest.ini").write_text(
        '[pytest]\naddopts = -p covering -m "not slow"\nparallel_batch = session\n'
    )
    return folder


@pytest.mark.parametrize(
    "arguments, count",
    [
        ([], 3 + 2),
        (["-m", ""], 9 + 1 + 4),
        (["-m", "slow"], 6 + 1 + 2),
        (["test_it.py::test_thinned[2-1]"], 1),  # no other case is there
    ],
)
def test_what_is_selected(suite, arguments, count):
    assert pytest_on(suite, "--collect-only", *arguments).count("<Function ") == count


def test_ranks_run_what_is_selected(suite):
    assert [verdict for _, verdict in verdicts(pytest_on(suite, "-m", "slow", "-k", "ranks"))] == [
        "PASSED"
    ] * 2
