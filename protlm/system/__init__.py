"""Files, folders, processes and terminals: what knows nothing of proteins."""
