#!/usr/bin/env bash
# 8 × CPU device on 2 hosts, 2 processes per host.
# Made by fiddlex launch. To start it: mkdir -p /shared/run && sbatch THIS_FILE; Slurm writes its log there.
#SBATCH --job-name=run
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --mem=0
#SBATCH --signal=TERM@300
#SBATCH --open-mode=append
#SBATCH --output=/shared/run/slurm-%j.log
#SBATCH --exclusive
#SBATCH --requeue

set -u
export FIDDLEX_STATUS_FILE=/shared/run/slurm-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}.status
srun --kill-on-bad-exit=0 --wait=300 --cpu-bind=none \
    python -P -m fiddlex launch task --max_restarts=100 -- \
    train \
    --config=gpt_tiny \
    --workdir=/shared/run \
    --fake_devices=2
status=$?
# The run's own status, from the task of rank 0: that of srun also counts tasks that an elastic run has lost.
if [[ -s $FIDDLEX_STATUS_FILE ]]; then status=$(<"$FIDDLEX_STATUS_FILE"); fi
rm -f "$FIDDLEX_STATUS_FILE"
job=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} # the other id may be that of a whole array
job=${job:-$SLURM_JOB_ID}
if [[ $status == @(138|140|143) && $(squeue --noheader --job="$job" --format=%T) == RUNNING ]]; then
    scontrol requeue "$job" # the run has saved, because of a preemption or the time limit
fi
exit "$status"
