"""Finds a pipeline schedule for given costs, a cap on memory and a clock, and a bound that no schedule can beat.

`problem` judges any schedule by the clocks of `fiddlex.simulate`. `search` takes the best of `blocks`, `greedy`, `beam`
and the schedules that have names, and improves it by `local_search`; `anywhere` tries several placements of stages.
"""
