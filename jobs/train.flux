#!/bin/bash
# jobs/demo.yaml with distseg under flux
# 2 samples x (1x2) tiles x 2 stages: 8 processes, on 2 nodes of 4
# Made by: distseg submit jobs/demo.yaml --system flux --gpus 4 --cores 96 --account BANK --output jobs/train.flux

# flux: --job-name=demo
# flux: --bank=BANK
# flux: --nodes=2
# flux: --exclusive
# flux: --time-limit=7200s
# flux: --output=demo.{{id}}.log

set -uo pipefail

export OMP_NUM_THREADS=24
export HOROVOD_CYCLE_TIME=1     # ms between the rounds in which its thread starts sums of gradients

# gpu-affinity=off: all processes of a node see all its GPUs; each takes the one of its number on the node.
flux run --nodes=2 --ntasks=8 --exclusive -o cpu-affinity=per-task -o gpu-affinity=off \
    python -m distseg train jobs/demo.yaml \
    --train.job_minutes 119 \
    --train.resume true     # from the last checkpoint in train.output, if there is one
code=$?

# 75: to be continued. distseg has written a checkpoint before the job's limit; a new job of the outer Flux goes on there.
if [ "$code" -eq 75 ]; then
    flux --parent batch jobs/train.flux && exit 0
    echo "the run is to be continued, but flux batch is refused here: submit the script again" >&2
fi
exit "$code"
