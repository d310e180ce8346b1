"""Runs the command `protlm` as `python -m protlm`."""

from protlm.cli import main

main()
