"""Apache Parquet: a row for each protein, with a column of vectors for each kind and layer.

The columns are `id`, `original_id`, `length` and `embedding`; with several kinds or layers,
KIND_LAYER in place of `embedding`. The attributes of the file are in the metadata of the schema.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from protlm.commands.embedding.job import Job, stored
from protlm.commands.embedding.results import Embedded, Results, end_to_end
from protlm.system.errors import UserError
from protlm.system.paths import complete_file
from protlm.system.terminal import JobProgress

SUFFIXES, WHAT = (".parquet",), "a Parquet file"


def write(results: Results, output: Path) -> None:
    """Writes the rows in the order of the input."""
    job, arrow = results.job, pyarrow()
    vector = arrow.list_(arrow.from_numpy_dtype(stored(job.options.dtype)), job.width)
    fields = [
        ("id", arrow.string()),
        ("original_id", arrow.string()),
        ("length", arrow.int64()),
        *(
            ("embedding" if job.options.is_single else f"{kind.value}_{layer}", vector)
            for kind, layer in job.keys
        ),
    ]
    metadata = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in results.attributes().items()
    }
    schema = arrow.schema(fields, metadata=metadata)
    with (
        complete_file(output, check=results.check) as temporary,
        arrow.parquet.ParquetWriter(temporary, schema) as writer,
        JobProgress("proteins written", len(results)) as progress,
    ):
        for block in results.blocks():
            writer.write_table(_table(arrow, schema, job, block))
            progress.advance(len(block))


def _table(arrow: Any, schema: Any, job: Job, block: list[Embedded]) -> Any:
    columns = [
        arrow.array([protein.record.identifier for protein in block]),
        arrow.array([protein.original_id for protein in block]),
        arrow.array([len(protein.record.sequence) for protein in block], arrow.int64()),
        *(
            arrow.FixedSizeListArray.from_arrays(
                arrow.array(end_to_end(block, key).ravel()), job.width
            )
            for key in job.keys
        ),
    ]
    return arrow.table(columns, schema=schema)


def pyarrow() -> Any:
    """Returns the package."""
    try:
        import_module("pyarrow.parquet")
        return import_module("pyarrow")
    except ImportError:
        raise UserError(
            "--format parquet needs pyarrow, which is not installed; type: "
            "pip install 'protlm[parquet]'"
        ) from None
