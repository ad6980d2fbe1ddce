"""What runs a schedule's table on devices: one scan over its ticks inside `shard_map`.

`engine` says what a device does in a tick, `executor` runs one batch, `continuous` runs on from batch to batch; `stage`
runs the layers of a stage, `residuals` takes a backward pass apart from its forward.
"""
