"""The command line, ``hf-actswap``: one module for each command, of the command's name.

In: arguments (`app`, `options`), a configuration and a model of which only the shapes exist (`subject`).
Out: text for people, or one JSON document with ``--json`` (`output`); the exit code.
"""
