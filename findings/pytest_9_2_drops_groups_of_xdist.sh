#!/usr/bin/env bash
# One would guess: tests marked `xdist_group` run on one worker with `pytest -n 2 --dist loadgroup`, as its
#   documentation says, or pytest-xdist tells that it cannot.
# Seen (pytest 9.2.0, pytest-xdist 3.8.0, 2026-11-29): they are spread over the workers, without a word. pytest-xdist
#   writes the group into a private field of an item (`_nodeid`), which pytest 9.2 no longer reads. With pytest 9.1.1
#   the tests of a group run on one worker.
# Where it bites: what tests of a group share, such as a compiled program or a server, is made once for each worker; and
#   tests that must not run at the same time do so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/test_group.py" <<'PY'
import time

import pytest

pytestmark = pytest.mark.xdist_group("one")


@pytest.mark.parametrize("number", range(8))
def test_its_worker(number, worker_id):
    time.sleep(0.1)
    with open("workers", "a") as file:
        file.write(f"{worker_id}\n")
PY
for version in 9.1.1 9.2.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q "pytest==$version" pytest-xdist==3.8.0
    rm -f "$folder/workers"
    (cd "$folder" && "$folder/$version/bin/pytest" -q -n 2 --dist loadgroup -p no:cacheprovider test_group.py)
    number=$(sort -u "$folder/workers" | wc -l)
    echo "pytest $version: the tests of one group ran on $number of 2 workers"
    if [ "$version" = 9.1.1 ]; then [ "$number" = 1 ]; else [ "$number" = 2 ]; fi
done
