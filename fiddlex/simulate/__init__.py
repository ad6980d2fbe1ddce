"""What a schedule costs: clocks and pictures, from nothing but the schedule and a few times."""
