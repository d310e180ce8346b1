"""`python -m protlm` is the command `protlm`."""

from protlm.cli import main

main()
