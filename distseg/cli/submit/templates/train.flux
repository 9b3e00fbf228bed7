#!/bin/bash
# @title@
# @mesh@
# Made by: @command@
# @about@

# flux: --job-name=@name@
# flux: --bank=@account@
# flux: --queue=@queue@
# flux: @options@
# flux: --nodes=@nodes@
# flux: --exclusive
# flux: --time-limit=@limit@
# flux: --output=@log@

set -uo pipefail

module load @modules@
source @activate@

export @environment@
export OMP_NUM_THREADS=@cores@
export HOROVOD_CYCLE_TIME=1     # ms between the rounds in which its thread starts sums of gradients

@entries@

# gpu-affinity=off: all processes of a node see all its GPUs; each takes the one of its number on the node.
@launch@ \
    python -m distseg @trains@ @arguments@ \
    --train.job_minutes @minutes@ \
    --train.resume true     # from the last checkpoint in train.output, if there is one
code=$?

# 75: to be continued. distseg has written a checkpoint before the job's limit; a new job of the outer Flux goes on there.
if [ "$code" -eq 75 ]; then
    flux --parent batch @again@ && exit 0
    echo "the run is to be continued, but flux batch is refused here: submit the script again" >&2
fi
exit "$code"
