"""Find damaged data in a store, a run or a checkpoint."""

from __future__ import annotations

from pathlib import Path

from distseg.data.store.check import check_store


def run_check(path: str) -> int:
    """Check a store or a run's checkpoints, print each damage found, and return the exit status.

    The exit status is 0 if nothing is damaged, else 2.
    """
    if not path.strip():
        raise ValueError("check reads a store or a run, but its path is empty: give a path")
    if Path(path).is_dir():
        from distseg.training.checkpoint.files import check_run

        findings = check_run(path)
    else:
        findings = check_store(path)
    for line in findings:
        print(line)
    print(f"{path}: {f'{len(findings)} damaged' if findings else 'whole'}")
    return 2 if findings else 0
