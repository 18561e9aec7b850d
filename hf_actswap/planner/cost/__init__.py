"""A step under a plan, on paper: its time and its memory."""
