"""Construction of the split rule from the options of `protlm prepare`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protlm.system.errors import UserError
from protlm.system.work_folder import refuse_finished

from .clusters import ClusterSplit, ClusterTable
from .families import PAPER_FAMILIES, FamilySplit, HeldOutFamilies
from .linclust import Clustering, cluster_sources
from .prepare import PrepareOptions
from .split import HashSplit, SplitRule, TableSplit
from .work_folder import DATA_SET


@dataclass(frozen=True)
class SplitOptions:
    """Options of the split rule; the default is a random split.

    Args:
        split_table: table of the split of each accession; excludes all options except clusters.
        ood_families: Pfam accessions, separate or joined by commas; if empty and a family table is
            given, the families of the Performer paper.
        cluster_table: the `cluster.tsv` of MMseqs2; determines the clusters, and without a split
            table also the splits.
        cluster: creates such a table with MMseqs2.
    """

    valid_fraction: float = 0.01
    test_fraction: float = 0.01
    split_table: Path | None = None
    ood_families: tuple[str, ...] = ()
    family_table: Path | None = None
    cluster_table: Path | None = None
    cluster: bool = False
    cluster_identity: float | None = None


def make_rule(
    options: SplitOptions, sources: Sequence[Path], out: Path, building: PrepareOptions
) -> tuple[SplitRule, ClusterTable | None]:
    """Builds the split rule, and the clusters that the data set stores, if any.

    Reads the tables, and clusters the sources if requested.
    """
    _check(options)
    fractions = HashSplit(options.valid_fraction, options.test_fraction)
    # Tables and clusters may take hours, so an output that cannot be written is reported first.
    refuse_finished(out, DATA_SET)
    if options.split_table is not None:
        return TableSplit(options.split_table), _clusters(options, sources, out, building)
    families = _held_out_families(options)
    clusters = _clusters(options, sources, out, building)
    rule = fractions if clusters is None else ClusterSplit(clusters, fractions, families)
    return rule if families is None else FamilySplit(families, rule), clusters


def _held_out_families(options: SplitOptions) -> HeldOutFamilies | None:
    if options.family_table is None:
        return None
    names = [name for given in options.ood_families for name in given.split(",") if name]
    if options.ood_families and not names:
        raise UserError("--ood-families is empty; give Pfam accessions: PF00069 PF07714")
    return HeldOutFamilies(options.family_table, names or PAPER_FAMILIES)


def _clusters(
    options: SplitOptions, sources: Sequence[Path], out: Path, building: PrepareOptions
) -> ClusterTable | None:
    path = options.cluster_table
    if options.cluster:
        clustering = Clustering(
            Clustering.identity if options.cluster_identity is None else options.cluster_identity,
            building.reading,
            building.break_lock,
        )
        path = cluster_sources(sources, out, clustering)
    return None if path is None else ClusterTable(path)


def _check(options: SplitOptions) -> None:
    others = {
        "--valid-fraction": options.valid_fraction != SplitOptions.valid_fraction,
        "--test-fraction": options.test_fraction != SplitOptions.test_fraction,
        "--family-table": options.family_table is not None,
    }
    given = [flag for flag, is_given in others.items() if is_given]
    if options.split_table is not None and given:
        raise UserError(
            f"--split-table determines the split of every record and excludes {given[0]}: give one"
        )
    if options.cluster_table is not None and options.cluster:
        raise UserError("--cluster creates a cluster table and excludes --cluster-table: give one")
    if options.cluster_identity is not None and not options.cluster:
        raise UserError("--cluster-identity requires --cluster, which is not given")
    if options.ood_families and options.family_table is None:
        raise UserError(
            "--ood-families requires --family-table TABLE, which lists the families of accessions: "
            "at uniprot.org choose Download, TSV, and the columns Entry and Pfam"
        )
