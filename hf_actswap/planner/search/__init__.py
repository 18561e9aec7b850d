"""The fastest plan within the limits."""
