"""Surviving a device that runs out of memory."""
