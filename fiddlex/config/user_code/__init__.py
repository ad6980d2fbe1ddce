"""Functions in a user's Python files: schedules, semantics, update rules."""
