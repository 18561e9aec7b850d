"""Searches the fastest plan within the limits."""
