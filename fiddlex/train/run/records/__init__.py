"""What a run records and reports: metrics, goodput, profiles, slow ranks."""
