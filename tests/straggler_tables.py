"""Tables of other people's jobs, as the artifact of the what-if paper has them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

DATA = Path(__file__).parent / "data"
SMALL_JOB = DATA / "slow_last_stage.csv"

_SPANS = """CREATE TABLE spans AS SELECT rank::INTEGER AS rank, step, optype::VARCHAR AS name,
    CASE WHEN optype IN ('forward-compute', 'backward-compute') THEN split_part(optype::VARCHAR, '-', 1)
        WHEN optype = 'gc' THEN 'gc' WHEN optype LIKE 'optimizer%' THEN 'optimizer' ELSE 'communication' END AS kind,
    round(start_ts::DOUBLE * 1e9)::BIGINT AS start_ns, round(duration::DOUBLE * 1e9)::BIGINT AS duration_ns,
    0 AS depth, CASE WHEN mb_id >= 0 THEN mb_id END::INTEGER AS microbatch, seq_id::INTEGER AS sequence,
    NULL::VARCHAR AS "group", NULL::BIGINT AS waiting_ns,
    CASE WHEN mc >= 0 THEN mc END::INTEGER AS chunk FROM {source}"""
_RANKS = """CREATE TABLE ranks AS
    SELECT DISTINCT rank::INTEGER AS rank, stage::INTEGER AS stage, dp_rank::INTEGER AS dp,
    NULL::INTEGER AS tp, NULL::INTEGER AS cp,
    NULL::INTEGER AS ep FROM {source}"""


def read_job(path: Path) -> DuckDBPyConnection:
    """Tables `spans` and `ranks` of a job with the columns of the published ones, Parquet or CSV."""
    import duckdb

    connection = duckdb.connect(config={"threads": 1})
    source = f"read_parquet('{path}')" if path.suffix == ".parquet" else f"read_csv('{path}')"
    for query in (_SPANS, _RANKS):
        connection.execute(query.format(source=source))
    return connection
