#!/usr/bin/env bash
# 8 × A100-SXM4-80GB on one host, 2 processes per host.
# Made by fiddlex launch. To start it: mkdir -p WORKDIR && sbatch FILE; Slurm writes its log there.
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
srun --kill-on-bad-exit=0 --wait=0 --cpus-per-task=12 \
    python -P -m fiddlex launch task --max_restarts=5 --elastic --devices_per_process=4 -- \
    train \
    --config=gpt_tiny \
    --workdir=/shared/run
status=$?
if [[ $status == 143 && $(squeue --noheader --job="$SLURM_JOB_ID" --format=%T) == RUNNING ]]; then
    scontrol requeue "$SLURM_JOB_ID" # the tasks have saved, because of a preemption or the time limit
fi
exit "$status"
