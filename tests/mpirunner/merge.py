"""The reports of all ranks about one test -> the one report that pytest shows. Passed means: passed on every rank."""

import re
from collections import defaultdict
from types import SimpleNamespace

import pytest
from _pytest._code.code import TerminalRepr

from .job import Job, ranks_named

PHASES = ("setup", "call", "teardown")


class RanksRepr(TerminalRepr):
    """Tracebacks under headings that say whose they are."""

    def __init__(self, parts: list[tuple[str, object]]):
        self.parts = parts
        crash = next((c for _, part in parts if (c := getattr(part, "reprcrash", None))), None)
        first = str(parts[0][1]).splitlines() or [""]
        what = (crash.message if crash else first[0]).splitlines()[0:1]
        message = ": ".join(filter(None, [parts[0][0], *what]))
        self.reprcrash = SimpleNamespace(
            message=message, path=getattr(crash, "path", ""), lineno=getattr(crash, "lineno", 0)
        )

    def toterminal(self, tw) -> None:
        for heading, part in self.parts:
            if heading:
                tw.sep("- ", heading, bold=True)
            if hasattr(part, "toterminal"):
                part.toterminal(tw)
            else:
                tw.line(str(part))


def merged(item, job: Job, problem: str | None) -> list[pytest.TestReport]:
    """A report a phase. A problem of the job itself falls on the first phase that not all ranks came through."""
    told, reports = job.told[item.nodeid], []
    for when in PHASES:
        of_ranks = {rank: _revived(item.config, data) for rank, data in told.reports[when].items()}
        if problem and (len(of_ranks) < job.n or when == PHASES[-1]):
            reports.append(_broken(item, job, when, of_ranks, problem))
            break
        if of_ranks and not (
            when == "call" and reports[0].failed
        ):  # where setup failed, no rank's call counts
            reports.append(_one(of_ranks, job.n))
    return reports


def lost(item, why: str) -> pytest.TestReport:
    """A test that could not run at all."""
    return _report(item, "setup", RanksRepr([("", why)]))


def _one(of_ranks: dict[int, pytest.TestReport], n: int) -> pytest.TestReport:
    """All ranks came through this phase."""
    failing = {rank: report for rank, report in of_ranks.items() if report.failed}
    expected = {
        rank: report
        for rank, report in of_ranks.items()
        if report.skipped and hasattr(report, "wasxfail")
    }
    report = next(iter((failing or expected or of_ranks).values()))
    report.duration = max(each.duration for each in of_ranks.values())
    outcomes = defaultdict(list)
    for rank, each in of_ranks.items():
        outcomes[each.outcome].append(rank)
    if failing:
        report.longrepr = RanksRepr(_tracebacks(failing, n))
        report.sections = _sections(failing)
    elif not expected and (
        len(outcomes) > 1 or len(of_ranks) < n
    ):  # say, skipped on some ranks only
        lines = [f"{outcome} on {ranks_named(ranks, n)}" for outcome, ranks in outcomes.items()]
        report.outcome, report.longrepr = (
            "failed",
            RanksRepr([("ranks disagree", ";\n".join(lines))]),
        )
    else:
        report.sections = _sections(of_ranks)
    return report


def _broken(
    item, job: Job, when: str, of_ranks: dict[int, pytest.TestReport], problem: str
) -> pytest.TestReport:
    failing = {rank: report for rank, report in of_ranks.items() if report.failed}
    parts = [*_tracebacks(failing, job.n), ("", "\n".join([problem, *job.traces()]))]
    started = job.told[item.nodeid].started
    return _report(
        item,
        when,
        RanksRepr(parts),
        _sections(of_ranks),
        job.clock.look() - started if started else 0.0,
    )


def _report(
    item, when: str, longrepr: RanksRepr, sections=(), duration: float = 0.0
) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid, location=item.location, keywords={name: 1 for name in item.keywords}, outcome="failed",
        longrepr=longrepr, when=when, sections=sections, duration=duration,
    )  # fmt: skip


def _tracebacks(failing: dict[int, pytest.TestReport], n: int) -> list[tuple[str, object]]:
    """Each failing rank once; those that say the same together."""
    alike = defaultdict(list)
    for rank, report in failing.items():
        alike[re.sub("0x[0-9a-f]+", "0x", str(report.longrepr))].append(rank)
    return [(ranks_named(ranks, n), failing[ranks[0]].longrepr) for ranks in alike.values()]


def _sections(of_ranks: dict[int, pytest.TestReport]) -> list[tuple[str, str]]:
    alike = defaultdict(list)
    for rank, report in of_ranks.items():
        for title, text in report.sections:
            alike[title, text].append(str(rank))
    return [(f"{title}, rank {', '.join(ranks)}", text) for (title, text), ranks in alike.items()]


def _revived(config, data: dict) -> pytest.TestReport:
    report = config.hook.pytest_report_from_serializable(config=config, data=dict(data))
    if isinstance(report.longrepr, list):  # a skip's (path, line, reason): JSON knows no tuples
        report.longrepr = tuple(report.longrepr)
    return report
