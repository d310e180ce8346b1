"""Draws the first batch of two blocks of a data set: DATA sequences|concatenated uniform|cluster.

Prints what it found, and the memory and page faults that it took.
"""

import json
import re
import resource
import sys
from pathlib import Path

from protlm.data.batching.mixture import Mixture
from protlm.data.batching.plan import BatchStream, Progress, forecast
from protlm.data.batching.strategies import Concatenation, LengthBuckets
from protlm.data.dataset import SequenceDataset
from protlm.data.masking import MaskingRule
from protlm.data.shards.data_set import open_clusters, open_split

RULES = {"sequences": LengthBuckets, "concatenated": Concatenation}


def used() -> dict[str, float]:
    """Returns the page faults, and the peak of the resident memory in MiB."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return {"faults": usage.ru_minflt + usage.ru_majflt, "mib": int(peak) / 1024}


def main() -> None:
    """Draws the batches."""
    directory, rule = Path(sys.argv[1]), RULES[sys.argv[2]](131_072, 1_024)
    before = used()
    clusters = None
    if sys.argv[3] == "cluster":
        clusters = [open_clusters(directory, "train", verify="sizes")]
    split = open_split(directory, "train", verify="sizes", shuffled=True)
    data = Mixture([split], clusters=clusters)
    order = data.order(seed=0)
    told = forecast(data.lengths_of, order, rule)
    dataset = SequenceDataset(data, objective="masked", masking=MaskingRule(), seed=0)
    assert rule.block_size == 16_384
    rows = 0
    for start in (Progress(), Progress(3, 3_000 * 16_384)):
        stream = BatchStream(data.lengths_of, order, rule, start=start, num_batches=10**9)
        rows = len(dataset[next(iter(stream))].samples_B)
    after = used()
    found = {
        "sequences": len(data),
        "clusters": data.num_clusters,
        "forecast": told,
        "rows": rows,
        "mib": after["mib"],
        "more_mib": after["mib"] - before["mib"],
        "faults": after["faults"] - before["faults"],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
