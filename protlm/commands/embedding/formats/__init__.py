"""The formats of `protlm embed --format NAME`: one module each, with the same function.

`write(results, output)` writes the file; it gets its final name only when it is complete.
"""
