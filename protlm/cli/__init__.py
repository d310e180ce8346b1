"""The command line: what a person types, one module per topic."""
