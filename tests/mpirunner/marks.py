"""What a test's marks say: on how many ranks, for how long, together with which others."""

RANKS = [1, 2, 4, 6]  # a bare @pytest.mark.parallel


def sizes(mark) -> list[int]:
    """parallel -> the default; parallel(4) -> [4]; parallel(1, 2) and parallel([1, 2]) -> [1, 2]."""
    given = mark.args[0] if len(mark.args) == 1 and not isinstance(mark.args[0], int) else mark.args
    found = list(given) or RANKS
    if any(not isinstance(n, int) or n < 1 for n in found):
        raise ValueError(
            f"@pytest.mark.parallel takes numbers of ranks, at least 1, not {found}: write parallel(4) or parallel([1, 2])"
        )
    return found


def ranks_of(item) -> int | None:
    """The number of ranks a test runs on; None for an ordinary test."""
    if item.get_closest_marker("parallel") is None or not hasattr(item, "callspec"):
        return None
    return item.callspec.params["ranks"]


def limit(item) -> float:
    """Seconds that a test may take."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0] if mark else item.config.getini("test_timeout"))


def batch(item) -> tuple | None:
    """Tests of one batch run in one job."""
    if (n := ranks_of(item)) is None:
        return None
    if (
        item.config.getini("parallel_batch") == "session"
        and item.get_closest_marker("alone") is None
    ):
        return (n,)
    return (n, str(item.path))


def starts_programs(item) -> bool:
    """Return True if an ordinary test starts whole command lines, and so comes last."""
    if ranks_of(item) is not None:
        return False
    return (
        "mpirun" in getattr(item, "fixturenames", ()) or item.get_closest_marker("last") is not None
    )


def ordered(items: list) -> list:
    """Ordinary tests first, for they are cheap; then the batches; then those that start whole command lines."""
    files = {path: i for i, path in enumerate(dict.fromkeys(item.path for item in items))}

    def place(item) -> tuple:
        if (key := batch(item)) is None:
            return (2,) if starts_programs(item) else (0,)
        return (1, len(key), files[item.path] if len(key) > 1 else 0, key[0])

    return sorted(items, key=place)
