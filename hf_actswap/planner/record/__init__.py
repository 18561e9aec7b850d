"""Makes the profile of a step: recorded as it runs, or computed from shapes."""
