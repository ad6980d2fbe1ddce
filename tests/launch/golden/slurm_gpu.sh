#!/usr/bin/env bash
# 16 × H100-SXM5-80GB on 2 hosts, one process per host.
# Made by fiddlex launch. To start it: mkdir -p WORKDIR && sbatch FILE; Slurm writes its log there.
#SBATCH --job-name=run
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --signal=TERM@300
#SBATCH --open-mode=append
#SBATCH --output=/shared/run/slurm-%j.log
#SBATCH --exclusive
#SBATCH --requeue

set -u
srun --kill-on-bad-exit=0 --wait=300 --cpu-bind=none \
    python -P -m fiddlex launch task --max_restarts=100 --devices_per_process=8 -- \
    train \
    --config=gpt_tiny \
    --workdir=/shared/run \
    --config.mesh.data=4
status=$?
if [[ $status == 143 && $(squeue --noheader --job="$SLURM_JOB_ID" --format=%T) == RUNNING ]]; then
    scontrol requeue "$SLURM_JOB_ID" # the tasks have saved, because of a preemption or the time limit
fi
exit "$status"
