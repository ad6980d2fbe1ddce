"""Pipeline schedules as data: this package makes, checks and prints them, and turns them into tables of ticks.

`schedule` defines what a schedule is, `generators` makes the named schedules, `validate` proves that a schedule is
legal, and `text` prints and reads schedules. `ticks` and `lowering` turn a schedule into a table of ticks, and
`placement` cuts the model's layers into stages. `semantics` and `windows` define what runs when batches are not
flushed. `resolve` builds the whole pipeline of a config.
"""
