"""jsrun's rules of resource sets, on Summit's nodes (42 cores, 6 GPUs) unless said."""

import re

import pytest

from distseg.cli.submit.jsrun import ResourceSets, check, parse

LONG = "jsrun --nrs 2 --rs_per_host 1 --tasks_per_rs 6 --gpu_per_rs 6 --cpu_per_rs 42 --launch_distribution packed --bind packed:7 python -m distseg train c.yaml"
SHORT = "jsrun -n2 -r1 -a6 -g6 -c42 -dpacked -bpacked:7 python -m distseg train c.yaml"


def test_long_and_short_options_are_the_same():
    mixed = "/opt/ibm/jsm/bin/jsrun -n 2 --rs_per_host=1 -a 6 --gpu_per_rs=6 \\\n -c 42 -b packed:7 -d packed --smpiargs=-gpu -E OMP_NUM_THREADS=7 --immediate a.out -n 99"
    expected = ResourceSets(2, 6, 42, 6, 1, None, "packed:7", "gpu-cpu,cpu-mem,cpu-cpu", "packed")
    assert parse(LONG) == parse(SHORT) == parse(mixed) == expected


@pytest.mark.parametrize(
    "line, nodes, tasks",
    [
        (LONG, 2, 12),
        (SHORT, 2, 12),
        ("jsrun -n12 -r6 -a1 -g1 -c7 -bpacked:7 a.out", 2, 12),  # a set a GPU: six sets fill a node
        ("jsrun -n4 -r2 -a3 -g3 -c21 -brs a.out", 2, 12),  # a set a socket
        ("jsrun -n12 -a1 -g1 -c7 a.out", 2, 12),  # as many sets a node as fit
        ("jsrun -n ALL_HOSTS -r1 -a6 -c ALL_CPUS -g ALL_GPUS -bpacked:7 a.out", 2, 12),
        ("jsrun -n2 -r1 -p 12 -c42 -g6 -bpacked:7 a.out", 2, 12),
        ("jsrun -n1 -a42 -c42 a.out", 1, 42),  # no GPU
        ("jsrun -n 4 -r 2 -a 6 -c 21 -g 3 -d cyclic -l GPU-CPU -bnone a.out", 2, 24),
        ("jsrun -n1 -a2 -c8 -bpacked:smt:16 a.out", 1, 2),  # hardware threads, not cores
    ],
)
def test_lines_that_keep_the_rules(line, nodes, tasks):
    assert check(line, nodes, 42, 6, tasks) == parse(line)


@pytest.mark.parametrize(
    "line, told",
    [
        ("srun -n2 a.out", "a jsrun line starts with jsrun, got 'srun'"),
        ("jsrun -n2 -q a.out", "jsrun option '-q' is unknown"),
        ("jsrun -n two a.out", "jsrun --nrs is 'two': it takes a whole number from 1 on"),
        ("jsrun -n 0 a.out", "jsrun --nrs is '0': it takes a whole number from 1 on"),
        ("jsrun -g -1 a.out", "jsrun --gpu_per_rs is '-1': it takes a whole number from 0 on"),
        ("jsrun --nrs", "jsrun --nrs has no value"),
        ("jsrun -b tight a.out", "jsrun --bind is 'tight': it takes none, rs or packed:N"),
        (
            "jsrun -d scattered a.out",
            "jsrun --launch_distribution is 'scattered': it takes packed, cyclic or plane:N",
        ),
        ("jsrun -l fast a.out", "jsrun --latency_priority is 'fast': it takes gpu-cpu"),
        (
            "jsrun -n2 -r1 -a6 -g6 -c43 a.out",
            "resource sets of 43 cores (--cpu_per_rs), but a node has 42 and a resource set never spans nodes: set --cpu_per_rs to 42 at most",
        ),
        (
            "jsrun -n1 -r1 -a12 -g12 -c42 a.out",
            "resource sets of 12 GPUs (--gpu_per_rs), but a node has 6 and a resource set never spans nodes",
        ),
        (
            "jsrun -n12 -r6 -a1 -g1 -c8 a.out",
            "6 resource sets a node (--rs_per_host) of 8 cores (--cpu_per_rs), which is 48, but a node has 42: set --rs_per_host to 5 at most, or --cpu_per_rs to 7",
        ),
        (
            "jsrun -n12 -r6 -a1 -g2 -c7 a.out",
            "6 resource sets a node (--rs_per_host) of 2 GPUs (--gpu_per_rs), which is 12, but a node has 6: set --rs_per_host to 3",
        ),
        (
            "jsrun -n3 -r1 -a4 -g6 -c42 a.out",
            "3 resource sets (--nrs), but 2 nodes hold 2, 1 a node (--rs_per_host): set --nrs to 2 at most, or take 3 nodes",
        ),
        (
            "jsrun -n13 -a1 -g1 -c7 a.out",
            "13 resource sets (--nrs), but 2 nodes hold 12, 6 a node, which is what fits: set --nrs to 12 at most, or take 3 nodes",
        ),
        (
            "jsrun -n2 -r1 -a4 -g6 -c42 a.out",
            "jsrun starts 8 tasks (2 resource sets of 4), but the mesh needs 12: set --nrs to 3, or change the mesh",
        ),
        (
            "jsrun -n2 -r1 -a5 -g6 -c42 a.out",
            "jsrun starts 10 tasks (2 resource sets of 5), but the mesh needs 12: set --nrs and --tasks_per_rs to a product of 12",
        ),
        (
            "jsrun -n12 -r6 -g1 -c7 -p 6 a.out",
            "jsrun starts 6 tasks (12 resource sets of up to 1), but the mesh needs 12",
        ),
        (
            "jsrun -n2 -r1 -a6 -p 11 -c42 a.out",
            "given 11 tasks (--np), but 2 resource sets of 6 (--tasks_per_rs) start 12: leave one of them out",
        ),
        (
            "jsrun -n2 -r1 -a6 -g6 -c42 -bpacked:8 a.out",
            "binds 6 tasks of a resource set to 8 cores each (--bind packed:8), together 48, but a resource set has 42 (--cpu_per_rs): set --bind to packed:7, or --cpu_per_rs to 48",
        ),
        (
            "jsrun -n2 -r1 -a6 -g6 a.out",
            "binds 6 tasks of a resource set to 1 cores each (--bind packed:1), together 6, but a resource set has 1 (--cpu_per_rs)",
        ),
    ],
)
def test_lines_that_break_a_rule_say_which(line, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        check(line, 2, 42, 6, 12)
