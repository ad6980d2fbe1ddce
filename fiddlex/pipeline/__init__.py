"""Pipeline parallelism: schedules as data, checked, printed, lowered to a table of ticks, and run by one scan.

`schedule` says what a schedule is, `generators` makes those that have names (`zero_bubble` the longer ones), `validate`
proves any of them legal, and `text` prints and reads them. None of these imports jax.
"""
