#!/usr/bin/env bash
# 16 × H100-SXM5-80GB on 2 hosts, 2 processes per host.
# Made by fiddlex launch. To start it: bash THIS_FILE, from a host that reaches all by ssh.

set -u
export NCCL_DEBUG=INFO
mpirun --host node0:2,node1:2 \
    -np 4 -N 2 --bind-to none -x NCCL_DEBUG \
    bash -c '(trap "" USR1; exec "$@" --process_id="$OMPI_COMM_WORLD_RANK") & task=$!
trap "kill -TERM $task; again=1" USR1
again=1
while ((again)); do again=0; wait "$task"; status=$?; done
case $status in 129 | 130 | 143) sleep 10 ;; esac
exit "$status"
' process \
    python -P -m fiddlex launch task --max_restarts=100 --devices_per_process=4 -- \
    train \
    --config=gpt_tiny \
    --workdir=/shared/run \
    --config.mesh.data=4 \
    --coordinator_address=node0:12345 \
    --num_processes=4 \
    & mpirun=$!
trap 'kill -USR1 "$mpirun"; again=1' TERM INT USR1
again=1
while ((again)); do again=0; wait "$mpirun"; status=$?; done
exit "$status"
