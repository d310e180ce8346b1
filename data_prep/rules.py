"""From the options of `protlm prepare` to the split rule."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.clusters import ClusterSplit
from data_prep.families import PAPER_FAMILIES, FamilySplit, HeldOutFamilies
from data_prep.linclust import Clustering, cluster_sources
from data_prep.prepare import PrepareOptions
from data_prep.split import HashSplit, SplitRule, TableSplit
from data_prep.work_folder import refuse_finished
from protlm.errors import UserError


@dataclass(frozen=True)
class SplitOptions:
    """How records are to be split; what is not given is a random split.

    Args:
        valid_fraction: share of `valid`.
        test_fraction: share of `test`.
        split_table: names the split of each accession; excludes the others.
        ood_families: Pfam accessions, each alone or several joined by commas; none means the
            Performer paper's, where a family table is given.
        family_table: the Pfam families of the accessions.
        cluster_table: the `cluster.tsv` of MMseqs2.
        cluster: makes such a table with MMseqs2.
        cluster_identity: the least identity within its clusters; default 0.5.
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
) -> SplitRule:
    """Builds the split rule; reads its tables, and clusters the sources if that was asked for.

    Args:
        options: what the user asked for.
        sources: the sequence files.
        out: the data set that is to be made.
        building: how it is to be made.

    Raises:
        UserError: options that exclude each other, lack another, or are impossible.
        InputDataError: a table cannot be used.
        OutputError: `out` exists or cannot be written.
    """
    _check(options)
    fractions = HashSplit(options.valid_fraction, options.test_fraction)
    # Tables and clusters may take hours: that nothing can be written is said before.
    refuse_finished(out)
    if options.split_table is not None:
        return TableSplit(options.split_table)
    families = None
    if options.family_table is not None:
        names = [name for given in options.ood_families for name in given.split(",") if name]
        if options.ood_families and not names:
            raise UserError("--ood-families names no family; give Pfam accessions: PF00069 PF07714")
        families = HeldOutFamilies(options.family_table, names or PAPER_FAMILIES)
    clusters = options.cluster_table
    if options.cluster:
        clustering = Clustering(
            Clustering.identity if options.cluster_identity is None else options.cluster_identity,
            building.reading,
            building.break_lock,
        )
        clusters = cluster_sources(sources, out, clustering)
    rule = fractions if clusters is None else ClusterSplit(clusters, fractions, families)
    return rule if families is None else FamilySplit(families, rule)


def _unless_default(value: float, default: float) -> float | None:
    return None if value == default else value


def _check(options: SplitOptions) -> None:
    others = {
        "--valid-fraction": _unless_default(options.valid_fraction, SplitOptions.valid_fraction),
        "--test-fraction": _unless_default(options.test_fraction, SplitOptions.test_fraction),
        "--family-table": options.family_table,
        "--cluster-table": options.cluster_table,
        "--cluster": options.cluster or None,
    }
    given = [flag for flag, value in others.items() if value is not None]
    if options.split_table is not None and given:
        raise UserError(
            f"--split-table says where every record goes, so it excludes {given[0]}: give one"
        )
    if options.cluster_table is not None and options.cluster:
        raise UserError("--cluster makes the table that --cluster-table names: give one of them")
    if options.cluster_identity is not None and not options.cluster:
        raise UserError("--cluster-identity is for --cluster, which is not given")
    if options.ood_families and options.family_table is None:
        raise UserError(
            "--ood-families needs --family-table TABLE, which says which accession is of which "
            "family: at uniprot.org choose Download, TSV, and the columns Entry and Pfam"
        )
