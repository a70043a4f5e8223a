"""Selects the prompts to keep, by DuckDB: no duplicates, within the limits, drawn for the traffic mix.

Rows, including refused ones, are numbered from 0 in the order of the sources. Data beyond MEMORY is on disk.
"""

import glob
from array import array
from collections import Counter
from itertools import accumulate
from pathlib import Path

import duckdb
import pyarrow

from eagle3.prompts.chunks import ScannedChunk, band_names
from eagle3.prompts.reading.sources import Source
from eagle3.prompts.traffic.mix import TrafficMix
from eagle3.settings.prompts import DuplicateSettings

MEMORY = "1GB"
BATCH = 64 * 2**20  # bytes of the shingles that are compared at a time
EXACT, ID, NEAR = "exact duplicate", "duplicate id", "near duplicate"
SOURCE_LIMIT, MIX, LIMIT = "past the limit of the source", "not drawn for the traffic mix", "past prompts.limit"


class Selection:
    """A database of the rows in `chunks`. In its table `fates`, `reason` is NULL for a prompt that is kept."""

    def __init__(self, folder: Path, chunks: list[ScannedChunk], *, threads: int):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "selection.duckdb").unlink(missing_ok=True)  # from a run that was killed
        self.db = duckdb.connect(
            str(folder / "selection.duckdb"),
            config={"memory_limit": MEMORY, "temp_directory": str(folder / "spilled"), "threads": threads},
        )
        self.starts = [0, *accumulate(chunk.summary["rows"] for chunk in chunks)]
        self.cuts: dict[int, int] = {}  # source → its first prompt past its limit
        self._open(chunks)

    def close(self) -> None:
        self.db.close()

    def _open(self, chunks: list[ScannedChunk]) -> None:
        sources = [chunk.source for chunk in chunks]
        files = {
            "filename": [str(chunk.path) for chunk in chunks],
            "pattern": [glob.escape(str(chunk.path)) for chunk in chunks],
            "start": self.starts[:-1],
            "source": sources,
            "source_start": [self.starts[sources.index(source)] for source in sources],
        }
        self._store("chunks", pyarrow.table(files))
        self.db.execute("""
            SET preserve_insertion_order = false;
            SET VARIABLE files = (SELECT list(pattern) FROM chunks);
            CREATE VIEW scanned AS
                SELECT (start + file_row_number)::INTEGER AS number, source, source_start, parquet.*
                FROM read_parquet(getvariable('files'), file_row_number = true, filename = true) AS parquet
                JOIN chunks USING (filename);
            CREATE MACRO repeating(reason, repeated, source_start) AS
                reason || CASE WHEN repeated < source_start THEN ' of another source' ELSE '' END;
            CREATE TABLE prompts AS
                SELECT number, source, source_start, id_hash AS id, text_hash AS text, cell
                FROM scanned WHERE reason IS NULL;
        """)

    def _store(self, name: str, arrow: pyarrow.Table) -> None:
        """Copy a table, which DuckDB finds by the name of the variable."""
        self.db.execute(f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM arrow")

    def apply(self, duplicates: DuplicateSettings, sources: list[Source]) -> None:
        """Find duplicates, and prompts past their source's limit, which do not make later ones duplicates.

        Prompts are duplicates of an earlier kept one by their text, or by a Jaccard similarity of `threshold` or more.
        """
        if duplicates.near:
            self._find_similar(duplicates)
        self._find_duplicates(duplicates)
        for number, source in enumerate(sources):
            if source.limit is not None and (cut := self._first_past(source.limit, f"source = {number}")) is not None:
                self.cuts[number] = cut
                self._find_duplicates(duplicates)

    def _find_similar(self, duplicates: DuplicateSettings) -> None:
        """Fill the table `alike` with pairs of similar texts, whether or not their prompts will be kept.

        Texts are compared if they share a band. Each is compared with at most `comparisons` earlier ones: the first of
        each band, and of these the ones that share the most bands. (Thousands of prompts of one template share bands.)
        """
        self.db.execute("""
            CREATE TABLE texts AS SELECT text, min(number) AS number FROM prompts GROUP BY text;
            CREATE TABLE sharing (later INTEGER, earlier INTEGER);
        """)
        for band in band_names(duplicates.bands):
            self.db.execute(f"""
                INSERT INTO sharing
                WITH keys AS (SELECT number, {band} AS key FROM scanned SEMI JOIN texts USING (number)),
                repeated AS (SELECT key FROM keys GROUP BY key HAVING count(*) > 1),
                members AS (
                    SELECT number, key, row_number() OVER (PARTITION BY key ORDER BY number) AS place
                    FROM keys SEMI JOIN repeated USING (key)
                )
                SELECT a.number, b.number FROM members AS a JOIN members AS b ON a.key = b.key AND a.place > b.place
                WHERE b.place <= {duplicates.comparisons}
            """)
        self.db.execute(f"""
            CREATE TABLE pairs AS
                SELECT later, earlier, count(*) AS shared FROM sharing GROUP BY later, earlier
                QUALIFY row_number() OVER (PARTITION BY later ORDER BY shared DESC, earlier)
                    <= {duplicates.comparisons};
            DROP TABLE sharing;
            CREATE TABLE candidates AS
                SELECT number, text_hash AS text, shingles FROM scanned
                SEMI JOIN (SELECT later AS number FROM pairs UNION SELECT earlier FROM pairs) USING (number);
        """)
        self._compare_pairs(duplicates.threshold)
        self.db.execute("DROP TABLE candidates; DROP TABLE batches")

    def _compare_pairs(self, threshold: float) -> None:
        """Compare in batches: DuckDB keeps the shingles of 2,048 joined rows in memory, however long they are."""
        self.db.execute(f"""
            CREATE TABLE alike (one UBIGINT, other UBIGINT, shared BIGINT);
            CREATE TABLE batches AS
                WITH sizes AS (SELECT number, 8 * len(shingles) AS size FROM candidates)
                SELECT later, earlier, shared, sum(a.size + b.size) OVER (ORDER BY later, earlier) // {BATCH} AS batch
                FROM pairs JOIN sizes AS a ON a.number = later JOIN sizes AS b ON b.number = earlier;
        """)
        for [batch] in self.db.execute("SELECT DISTINCT batch FROM batches ORDER BY batch").fetchall():
            self.db.execute(f"""
                INSERT INTO alike
                WITH compared AS (
                    SELECT a.text AS one, b.text AS other, shared,
                        len(list_intersect(a.shingles, b.shingles)) AS common,
                        len(a.shingles) + len(b.shingles) AS total
                    FROM (SELECT * FROM batches WHERE batch = {batch})
                    JOIN candidates AS a ON a.number = later JOIN candidates AS b ON b.number = earlier
                )
                SELECT one, other, shared FROM compared WHERE common / (total - common) >= {threshold}
            """)

    def _find_duplicates(self, duplicates: DuplicateSettings) -> None:
        """Fill `fates`: duplicates among the prompts within the limits of their sources, and those past the limits."""
        past = " OR ".join(f"source = {source} AND number >= {cut}" for source, cut in self.cuts.items()) or "false"
        self.db.execute(f"""
            CREATE OR REPLACE TABLE fates AS SELECT *, NULL::VARCHAR AS reason FROM prompts WHERE NOT ({past})
        """)
        for column, reason in _steps(duplicates):
            first = f"(SELECT {column}, min(number) AS first FROM fates WHERE reason IS NULL GROUP BY {column})"
            self._refuse(
                "number > first", f"repeating('{reason}', first, source_start)", f"JOIN {first} USING ({column})"
            )
        if duplicates.near:
            self._store("near", self._near_duplicates())
            self._refuse("later = number", f"repeating('{NEAR}', earlier, source_start)", "JOIN near ON later = number")
        self.db.execute(f"INSERT INTO fates SELECT *, '{SOURCE_LIMIT}' FROM prompts WHERE {past}")

    def _near_duplicates(self) -> pyarrow.Table:
        """Return the dropped prompts, each with the earlier kept prompt that it repeats."""
        pairs = self.db.execute("""
            WITH kept AS (SELECT number, text FROM fates WHERE reason IS NULL)
            SELECT greatest(a.number, b.number) AS later, least(a.number, b.number) AS earlier
            FROM alike JOIN kept AS a ON a.text = one JOIN kept AS b ON b.text = other
            ORDER BY later, shared DESC, earlier
        """)
        is_dropped = bytearray(self.starts[-1])
        dropped, repeated = array("i"), array("i")
        while rows := pairs.fetchmany(10_000):
            for later, earlier in rows:
                if not (is_dropped[later] or is_dropped[earlier]):
                    is_dropped[later] = 1
                    dropped.append(later)
                    repeated.append(earlier)
        return pyarrow.table({"later": pyarrow.array(dropped), "earlier": pyarrow.array(repeated)})

    def _refuse(self, condition: str, reason: str, join: str = "") -> None:
        """Set `reason` for the kept prompts that meet `condition`."""
        self.db.execute(f"""
            CREATE OR REPLACE TABLE fates AS
            SELECT fates.* REPLACE (CASE WHEN reason IS NULL AND {condition} THEN {reason} ELSE reason END AS reason)
            FROM fates {f"LEFT {join}" if join else ""}
        """)

    def _first_past(self, limit: int, condition: str = "true") -> int | None:
        """Return the number of the kept prompt after the first `limit`, None if there are no more."""
        query = f"SELECT number FROM fates WHERE reason IS NULL AND {condition} ORDER BY number LIMIT 1 OFFSET {limit}"
        found = self.db.execute(query).fetchone()
        return found[0] if found else None

    def kept(self, sources: int) -> list[int]:
        """Count the kept prompts of each source."""
        counts = self.db.execute("SELECT source, count(*) FROM fates WHERE reason IS NULL GROUP BY source").fetchall()
        return [dict(counts).get(source, 0) for source in range(sources)]

    def refused(self, source: int) -> Counter[str]:
        """Count the reasons against prompts of a source."""
        query = "SELECT reason, count(*) FROM fates WHERE reason IS NOT NULL AND source = ? GROUP BY reason"
        return Counter(dict(self.db.execute(query, [source]).fetchall()))

    def draw(self, mix: TrafficMix, sample: Counter[int]) -> dict:
        """Keep the number of prompts of each cell that the mix wants, by a hash of text and seed; return its report."""
        counts = self.db.execute("SELECT cell, count(*) FROM fates WHERE reason IS NULL GROUP BY cell").fetchall()
        wanted, report = mix.choose(dict(counts), sample=sample)
        self._store("wanted", pyarrow.table({"cell": list(wanted), "wanted": list(wanted.values())}))
        self.db.execute(f"""
            CREATE TABLE undrawn AS
            SELECT number FROM (SELECT * FROM fates WHERE reason IS NULL) JOIN wanted USING (cell)
            QUALIFY row_number() OVER (PARTITION BY cell ORDER BY md5(concat(text, ':{mix.seed}')), number) > wanted
        """)
        self._refuse("undrawn.number IS NOT NULL", f"'{MIX}'", "JOIN undrawn ON undrawn.number = fates.number")
        return report

    def limit(self, limit: int) -> None:
        """Keep the first `limit` prompts."""
        if (past := self._first_past(limit)) is not None:
            self._refuse(f"number >= {past}", f"'{LIMIT}'")

    def reasons(self, chunk: int) -> dict[int, str]:
        """Return the reasons for refusing prompts of a chunk, by their row in it."""
        query = "SELECT number, reason FROM fates WHERE reason IS NOT NULL AND number >= ? AND number < ?"
        start, end = self.starts[chunk], self.starts[chunk + 1]
        return {number - start: reason for number, reason in self.db.execute(query, [start, end]).fetchall()}

    def repeated_ids(self, chunk: int) -> set[int]:
        """Return the kept prompts of a chunk whose id an earlier kept prompt has, by their row in it."""
        self.db.execute("""
            CREATE TABLE IF NOT EXISTS repeated AS
                SELECT number FROM fates WHERE reason IS NULL
                QUALIFY row_number() OVER (PARTITION BY id ORDER BY number) > 1
        """)
        start, end = self.starts[chunk], self.starts[chunk + 1]
        query = "SELECT number FROM repeated WHERE number >= ? AND number < ?"
        return {number - start for [number] in self.db.execute(query, [start, end]).fetchall()}


def _steps(duplicates: DuplicateSettings) -> list[tuple[str, str]]:
    """Return the columns whose values must be unique, with the reason for refusing repetitions.

    Other prompts with the same id are kept: shards of one data set may all count from 0.
    """
    if duplicates.exact:
        return [("text", EXACT)]
    return [("text", NEAR)] if duplicates.near else [("id, text", ID)]
