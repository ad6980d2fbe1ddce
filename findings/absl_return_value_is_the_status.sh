#!/usr/bin/env bash
# One would guess: absl's app.run(main) ends with status 0 when main returns without an error, whatever it returns.
# Seen (absl-py 2.5.1, 2026-11-27): the result of main goes to sys.exit. A main that returns its metrics as a dict or a
#   string prints them to stderr and ends with status 1; one that returns True has 1; a count of 256 steps has 0 and one
#   of 300 has 44.
# Where it bites: main returns its final metrics so that a test or a notebook may call it. The finished job counts as
#   failed: Kubernetes starts it again, and under Slurm the jobs that depend on it (afterok) do not start.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q absl-py==2.5.1
found=()
for result in None '{"loss": 2.5}' '"done"' True 256 300; do
    status=0
    "$folder/env/bin/python" -c "from absl import app; app.run(lambda argv: $result)" 2>/dev/null || status=$?
    echo "main returns $result: status $status"
    found+=("$status")
done
[ "${found[*]}" = "0 1 1 1 0 44" ]
