"""The formats of `protlm embed --format NAME`: one module each, with the same two functions.

`check(options)` refuses settings that the format cannot hold, and `write(results, output)` writes
the file; it gets its final name only when it is complete.
"""
