"""Keeps optimizer states on the host between the optimizer's steps."""
