"""Pipeline parallelism: schedules as data, checked, printed, lowered to a table of ticks, and run by one scan.

`schedule` says what a schedule is, `generators` makes those that have names (`zero_bubble` the longer ones), `validate`
proves any of them legal, and `text` prints and reads them. `ticks` and `lowering` turn one into a table, `placement`
cuts the model's layers into its stages. None of these imports jax. `executor` scans the table; `stage` runs the layers
of a stage, `residuals` takes a backward pass apart from its forward.
"""
