#!/bin/bash
# Jobs of `distseg submit` on a real Slurm of one node, started on this machine for the time of a test: one is cut off by its
# limit, queues again, goes on, ends. Writes its story to benchmarks/slurm.md. Slurm's programs are installed first, as root on Debian.
set -euo pipefail
cd "$(dirname "$0")/.."

PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
PACKAGES="slurm-wlm munge libpmix2 libpmix-dev"
if ! command -v munged slurmctld slurmd srun >/dev/null; then
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "Slurm is not installed: have your system's administrator install it (on Debian $PACKAGES)" >&2
        exit 1
    fi
    apt-get update -q
    RUNLEVEL=1 apt-get install -q -y --no-install-recommends $PACKAGES     # 1: no service is started; the test starts its own
fi

DISTSEG_SLURM_LOG=$PWD/benchmarks/slurm.md exec python -m pytest tests/test_slurm.py -v "$@"
