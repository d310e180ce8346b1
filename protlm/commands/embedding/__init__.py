"""The parts of `protlm embed`: plan, unfinished results, formats."""
