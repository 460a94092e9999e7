"""The report of runs and results: one HTML page."""
