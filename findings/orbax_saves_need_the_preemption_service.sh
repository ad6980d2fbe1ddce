#!/usr/bin/env bash
# One would guess: without jax's preemption service (jax_enable_preemption_service=False, for runs that handle SIGTERM
#   themselves) a run of several processes gets no notices of preemption, and saves as before.
# Seen (orbax-checkpoint 0.11.40, jax 0.10.0, numpy 2.0.0, two processes on a CPU, 2026-11-28): each save of a
#   CheckpointManager raises RuntimeError, "Preemption sync manager has not been initialized". A process that has
#   not called jax.distributed.initialize saves. Orbax asks jax at every save whether a preemption has come, and
#   jax answers with an error. The code of 0.11.30 to 0.12.0 is alike there; 0.12.8 takes the error for "no preemption".
# Where it bites: the first save of the first run on two hosts, after tests with one process have passed. A subclass of
#   CheckpointManager whose reached_preemption returns False saves.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q jax==0.10.0 orbax-checkpoint==0.11.40 numpy==2.0.0
cat >"$folder/save.py" <<'PY'
import sys

import jax
import orbax.checkpoint as ocp

folder, port, rank, number = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
jax.config.update("jax_enable_preemption_service", False)
if number > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", number, rank)
mesh = jax.make_mesh((number,), ("data",))
x = jax.device_put(jax.numpy.arange(8.0), jax.NamedSharding(mesh, jax.P("data")))


class NeverPreempted(ocp.CheckpointManager):
    def reached_preemption(self, step: int) -> bool:
        return False


def save(kind, name):
    everyone = ocp.options.MultiprocessingOptions(active_processes=set(range(number)))
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=everyone)
    try:
        with kind(f"{folder}/{name}", options=options) as manager:
            manager.save(1, args=ocp.args.StandardSave({"x": x}))
            return "saved"
    except RuntimeError as error:
        return str(error).splitlines()[0].split(". ")[0]


print(f"{number} processes, rank {rank}:", save(ocp.CheckpointManager, "plain"), "|", save(NeverPreempted, "never"))
PY
port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
for number in 1 2; do
  mkdir -p "$folder/$number/plain" "$folder/$number/never"
  at=$(port)
  for ((rank = 0; rank < number; rank++)); do
    JAX_PLATFORMS=cpu "$folder/env/bin/python" "$folder/save.py" "$folder/$number" "$at" "$rank" "$number" \
      2>"$folder/log$rank" | tee -a "$folder/said" &
  done
  wait
done
grep -q '^1 processes, rank 0: saved | saved$' "$folder/said"
test "$(grep -c '^2 processes, .*: Preemption sync manager has not been initialized | saved$' "$folder/said")" = 2
