"""Runs the command `protlm` as `python -m protlm`."""

from protlm.system.processes import ignore_modules_of_working_folder

ignore_modules_of_working_folder()

from protlm.cli.main import main  # noqa: E402

main()
