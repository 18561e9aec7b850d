"""Predicts the time and the memory of a step under a plan, by simulation."""
