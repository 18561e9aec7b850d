"""What runs inside a rehearsed program, beside its own code: nothing else of the library is imported there.

PyTorch is not imported here: its module comes as an argument, once the program has imported it.
"""
