"""What a step does: recorded as it runs, or computed from shapes."""
