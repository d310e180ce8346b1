"""Reads sequences of 2,000 shards with few file descriptors: DATA."""

import resource
import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    # The number of shards that stay open follows from the limit when the module is imported.
    from protlm.data.shards.data_set import open_split

    reader = open_split(Path(sys.argv[1]), "train", verify="sizes")
    assert len(reader) == 16 * 2_000
    for index in np.random.default_rng(0).permutation(len(reader))[:5_000].tolist():
        assert len(reader[index]) == len(reader[index % 16])
    assert len(list(Path("/dev/fd").iterdir())) < 200
