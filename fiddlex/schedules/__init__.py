"""Pipeline schedules as data: made, checked, printed, lowered to a table of ticks, and cut into windows.

`schedule` says what a schedule is, `generators` makes those that have names, `validate` proves any of them legal, and
`text` prints and reads them. `ticks` and `lowering` turn one into a table, `placement` cuts the model's layers into its
stages, `semantics` and `windows` say what runs where batches are not flushed. `resolve` makes all of it of a config.
"""
