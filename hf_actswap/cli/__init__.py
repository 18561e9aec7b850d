"""The command line, ``hf-actswap``: one module for each command, and what they have in common beside them."""
