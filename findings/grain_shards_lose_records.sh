#!/usr/bin/env bash
# One would guess: with drop_remainder=False, the shards of grain's IndexSampler have all records between them, and with
#   shuffle=True a shard sees any record in some epoch.
# Seen (grain 0.2.18, 2026-11-27): drop_remainder=False moves the borders of the shards, and each shard still reads as
#   many records as the smallest has. Of 7 records on 2 shards record 3 is never read in order; of 10 on 4, records 2
#   and 5 are not. Shards are ranges of records that stay the same in all epochs, and records are shuffled within a
#   range only.
# Where it bites: hosts that read one set of documents in shards: some are never trained on; and if the documents are in
#   order of their source, every host has its own source for the whole run.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q grain==0.2.18
"$folder/env/bin/python" - <<'PY'
import grain


def shards(records, number, **options):
    """The records that each shard's loader reads."""
    for index in range(number):
        sharding = grain.sharding.ShardOptions(index, number, drop_remainder=False)
        sampler = grain.samplers.IndexSampler(records, shard_options=sharding, **options)
        source = grain.sources.RangeDataSource(0, records, 1)
        yield [int(record) for record in grain.DataLoader(data_source=source, sampler=sampler, worker_count=0)]


missed = {}
for records, number in ((7, 2), (10, 4)):
    read = list(shards(records, number, num_epochs=1))
    missed[records] = set(range(records)).difference(*read)
    print(f"{records} records on {number} shards: {read}; not read: {sorted(missed[records])}")
assert missed == {7: {3}, 10: {2, 5}}
seen = [sorted(set(each)) for each in shards(8, 2, num_epochs=50, shuffle=True, seed=0)]
print(f"8 records on 2 shards, shuffled, 50 epochs: shards see {seen}")
assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]]
PY
