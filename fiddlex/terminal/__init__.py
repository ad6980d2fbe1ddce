"""The command line of the programs, and what they show on a terminal, in a notebook or in a log."""
