#!/usr/bin/env bash
# One would guess: worker_count of grain's DataLoader changes how fast batches come, and not which they are.
# Seen (grain 0.2.18, 2026-11-27): each worker makes batches of its own records, every n-th one. 9 records in batches of
#   3 are 3 full batches with 0 or 1 worker. With 2 workers batch 0 is records 0, 2, 4, and there are 4 batches, two of
#   them short. With MapDataset.batch before to_iter_dataset() and mp_prefetch, workers change nothing.
# Where it bites: a run is continued or reproduced on a machine with other workers: it sees other batches, and an epoch
#   has another number of steps. Workers need parsed absl flags, which a program without absl.app has to say itself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q grain==0.2.18
cat >"$folder/batches.py" <<'PY'
import grain
from absl import flags


def loader(workers):
    sampler = grain.samplers.IndexSampler(9, shard_options=grain.sharding.NoSharding(), num_epochs=1)
    source = grain.sources.RangeDataSource(0, 9, 1)
    return grain.DataLoader(
        data_source=source, sampler=sampler, operations=[grain.transforms.Batch(3)], worker_count=workers
    )


def dataset(workers):
    batches = grain.MapDataset.range(9).batch(3).to_iter_dataset()
    return batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))


if __name__ == "__main__":
    flags.FLAGS.mark_as_parsed()
    found = []
    for name, workers, make in (("DataLoader", 0, loader), ("DataLoader", 2, loader), ("MapDataset", 2, dataset)):
        found.append([batch.tolist() for batch in make(workers)])
        print(f"{name}, {workers} workers: {found[-1]}")
    assert found[0] == found[2] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert found[1] == [[0, 2, 4], [1, 3, 5], [6, 8], [7]]
PY
"$folder/env/bin/python" "$folder/batches.py"
