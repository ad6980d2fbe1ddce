"""What a schedule costs: clocks, memory and pictures, from nothing but the schedule and a few times. Imports no jax."""
