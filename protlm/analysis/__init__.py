"""What is computed from a trained model and its proteins: maps, contacts, structures, probes.

The evaluations, the page of `protlm inspect` and other commands share these modules.
"""
