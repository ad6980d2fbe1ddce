"""Pipeline schedules as data: this package makes, checks and prints them, and turns them into tables of ticks.

`schedule` defines what a schedule is, and `resolve` builds the whole pipeline of a config.
"""
