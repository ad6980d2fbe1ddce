"""Finds a pipeline schedule for given costs, a cap on memory and a clock, and a bound that no schedule can beat.

`problem` says what is asked and judges any schedule by the clocks of `fiddlex.simulate`. `bounds` computes times that
no schedule can beat. `blocks` solves the steady state of a pipeline exactly, `greedy` builds whole schedules under
limits on what is in flight, and `local_search` improves the order of one schedule. `search` combines them all with the
schedules that have names, `cache` keeps its answers, `anywhere` asks for several placements of stages, and `report`
says what was found.
"""
