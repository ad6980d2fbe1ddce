#!/usr/bin/env bash
# 8 × A100-SXM4-80GB on one host, 2 processes per host.
# Made by fiddlex launch. To start it: mkdir -p /shared/run && sbatch THIS_FILE; Slurm writes its log there.
#SBATCH --job-name=tiny
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --partition=gpu
#SBATCH --account=me
#SBATCH --qos=low
#SBATCH --time=1-00:00:00
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append
#SBATCH --output=/shared/run/slurm-%j.log
#SBATCH --requeue
#SBATCH --no-kill

set -u
export NCCL_DEBUG=INFO
export GREETING='it'"'"'s $HOME'
export FIDDLEX_STATUS_FILE=/shared/run/slurm-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}.status
srun --no-kill --kill-on-bad-exit=0 --wait=0 --cpus-per-task=12 \
    python -P -m fiddlex launch task --max_restarts=5 --elastic --devices_per_process=4 -- \
    train \
    --config=gpt_tiny \
    --workdir=/shared/run
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
