"""The options of commands. A field is a flag: its name, type, help, range and what it excludes.

These modules import neither PyTorch nor NumPy, so that flags are checked before these are loaded.
"""
