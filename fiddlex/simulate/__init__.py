"""What a schedule costs: clocks and plots that need only the schedule and a few times."""
