"""Lets training survive when the device runs out of memory."""
