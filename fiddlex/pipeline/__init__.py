"""Runs a schedule's table on devices: one loop over its ticks inside `shard_map`.

`engine` defines what a device does in a tick, `executor` runs one batch, and `continuous` runs batch after batch;
`stage` runs the layers of a stage, and `residuals` separates a backward pass from its forward.
"""
