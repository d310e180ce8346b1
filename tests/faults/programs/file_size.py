"""A limit on the size of files, which a writer sees as it sees a full disk."""

import resource


def limit_file_size(size: int) -> None:
    """Limits the files of this process to a number of bytes; -1 is no limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
