"""The commands, one module each: parse, build, run, print."""
