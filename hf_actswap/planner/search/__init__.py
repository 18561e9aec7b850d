"""Searches for the fastest plan within the limits."""
