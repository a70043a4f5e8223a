"""Selects the prompts to keep, by DuckDB: no duplicates, within the limits, drawn for the traffic mix, or held out.

Tables and views of the database, a row for each

    scanned       row of a chunk: `number`, `source`, hashes of text and id, shingles, `reason` if a filter refused it
    prompts       row that no filter refused
    known         prompt that an earlier run kept
    alike         pair of similar texts; `related`: of similar questions
    decisions     prompt, with the `reason` against it, or NULL
    kept          prompt without a reason

`number` counts all rows from 0 in the order of the sources, so that of two equal prompts the lower number is kept.
Prompts of earlier runs have numbers below 0. Data beyond MEMORY is on disk.
"""

import glob
from array import array
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import duckdb
import pyarrow

from eagle3.prompts.chunks import ScannedChunk, band_names
from eagle3.prompts.reading.sources import Source
from eagle3.prompts.traffic.mix import TrafficMix
from eagle3.settings.prompts import DuplicateSettings

MEMORY = "1GB"
BATCH = 64 * 2**20  # bytes of the shingles that are compared at a time
EXACT, ID, NEAR = "exact duplicate", "duplicate id", "near duplicate"
KNOWN = "known"  # how the reasons begin that name an earlier run
SOURCE_LIMIT, MIX, LIMIT = "past the limit of the source", "not drawn for the traffic mix", "past prompts.limit"
HELD_OUT, NOT_HELD_OUT = "held out", "not held out"  # why a prompt is in one of the two sets only


class Selection:
    """A database of the rows in `chunks`.

    known: the chunks of earlier runs' prompts; each `source` there is an index of `folders`.
    """

    def __init__(
        self,
        folder: Path,
        chunks: list[ScannedChunk],
        known: list[ScannedChunk],
        folders: list[str],
        *,
        threads: int,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "selection.duckdb").unlink(missing_ok=True)  # from a run that was killed
        self.db = duckdb.connect(
            str(folder / "selection.duckdb"),
            config={"memory_limit": MEMORY, "temp_directory": str(folder / "spilled"), "threads": threads},
        )
        self.starts = [0, *accumulate(chunk.summary["rows"] for chunk in chunks)]
        self.cuts: dict[int, int] = {}  # source → its first prompt past its limit
        self._open(chunks, known, folders)

    def close(self) -> None:
        self.db.close()

    def _open(self, chunks: list[ScannedChunk], known: list[ScannedChunk], folders: list[str]) -> None:
        sources = [chunk.source for chunk in chunks]
        before = list(accumulate((-chunk.summary["rows"] for chunk in reversed(known)), initial=0))[:0:-1]
        files = {
            "filename": [str(chunk.path) for chunk in (*known, *chunks)],
            "pattern": [glob.escape(str(chunk.path)) for chunk in (*known, *chunks)],
            "start": [*before, *self.starts[:-1]],
            "source": [chunk.source for chunk in known] + sources,
            "source_start": [*before, *(self.starts[sources.index(source)] for source in sources)],
        }
        self._store("chunks", pyarrow.table(files))
        owners = pyarrow.array([f"{KNOWN}: {folder}" for folder in folders], pyarrow.string())
        self._store("owners", pyarrow.table({"source": range(len(folders)), "owner": owners}))
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
                FROM scanned WHERE reason IS NULL AND number >= 0;
            CREATE TABLE known AS SELECT number, source, text_hash AS text FROM scanned WHERE number < 0;
        """)

    def _store(self, name: str, arrow: pyarrow.Table) -> None:
        """Copy a table, which DuckDB finds by the name of the variable."""
        self.db.execute(f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM arrow")

    def apply(self, duplicates: DuplicateSettings, sources: list[Source]) -> None:
        """Find duplicates, and prompts past their source's limit, which do not make later ones duplicates.

        Prompts are duplicates of an earlier kept one of the same mode if their texts are equal, or if questions and
        answers both have a Jaccard similarity of `threshold` or more.
        """
        if duplicates.near:
            texts = "SELECT text, number FROM prompts UNION ALL SELECT text, number FROM known"
            self._find_similar("alike", texts, duplicates, within_modes=True)
        self._find_known(near=duplicates.near)
        self._find_duplicates(duplicates)
        for number, source in enumerate(sources):
            if source.limit is not None and (cut := self._first_past(source.limit, f"source = {number}")) is not None:
                self.cuts[number] = cut
                self._find_duplicates(duplicates)

    def _find_similar(self, name: str, texts: str, duplicates: DuplicateSettings, *, within_modes: bool) -> None:
        """Fill the table `name` with pairs of similar texts of `texts`, whether or not their prompts will be kept.

        within_modes: compare prompts of one mode, with their answers; else all, by their questions alone.

        Texts are compared if they share a band. Each is compared with at most `comparisons` earlier ones: the first of
        each band, and of these the ones that share the most bands. (Thousands of prompts of one template share bands.)
        """
        self.db.execute(f"""
            CREATE OR REPLACE TABLE texts AS SELECT text, min(number) AS number FROM ({texts}) GROUP BY text;
            CREATE TABLE sharing (later INTEGER, earlier INTEGER);
        """)
        for band in band_names(duplicates.bands):
            key = f"xor({band}, mode_hash)" if within_modes else band
            self.db.execute(f"""
                INSERT INTO sharing
                WITH keys AS (SELECT number, {key} AS key FROM scanned SEMI JOIN texts USING (number)),
                repeated AS (SELECT key FROM keys GROUP BY key HAVING count(*) > 1),
                members AS (
                    SELECT number, key, row_number() OVER (PARTITION BY key, number < 0 ORDER BY number) AS place
                    FROM keys SEMI JOIN repeated USING (key)
                )
                SELECT a.number, b.number FROM members AS a JOIN members AS b ON a.key = b.key AND a.number > b.number
                WHERE a.number >= 0 AND b.place <= {duplicates.comparisons}
            """)
        self.db.execute(f"""
            CREATE TABLE pairs AS
                SELECT later, earlier, count(*) AS shared FROM sharing GROUP BY later, earlier
                QUALIFY row_number() OVER (PARTITION BY later ORDER BY shared DESC, earlier)
                    <= {duplicates.comparisons};
            DROP TABLE sharing;
            CREATE TABLE candidates AS
                SELECT number, text_hash AS text, shingles, {"answers" if within_modes else "[]::UBIGINT[]"} AS answers
                FROM scanned SEMI JOIN (SELECT later AS number FROM pairs UNION SELECT earlier FROM pairs)
                USING (number);
        """)
        self._compare_pairs(name, duplicates.threshold)
        self.db.execute("DROP TABLE pairs; DROP TABLE candidates; DROP TABLE batches")

    def _compare_pairs(self, name: str, threshold: float) -> None:
        """Compare in batches: DuckDB keeps the shingles of 2,048 joined rows in memory, however long they are.

        Answers are compared where both texts have some: prompts that an earlier run kept may have none.
        """
        self.db.execute(f"""
            CREATE TABLE {name} (one UBIGINT, other UBIGINT, shared BIGINT);
            CREATE TABLE batches AS
                WITH sizes AS (SELECT number, 8 * (len(shingles) + len(answers)) AS size FROM candidates)
                SELECT later, earlier, shared, sum(a.size + b.size) OVER (ORDER BY later, earlier) // {BATCH} AS batch
                FROM pairs JOIN sizes AS a ON a.number = later JOIN sizes AS b ON b.number = earlier;
        """)
        for [batch] in self.db.execute("SELECT DISTINCT batch FROM batches ORDER BY batch").fetchall():
            self.db.execute(f"""
                INSERT INTO {name}
                WITH compared AS (
                    SELECT a.text AS one, b.text AS other, shared,
                        len(list_intersect(a.shingles, b.shingles)) AS common,
                        len(a.shingles) + len(b.shingles) AS total,
                        len(list_intersect(a.answers, b.answers)) AS common_answers,
                        len(a.answers) + len(b.answers) AS total_answers,
                        len(a.answers) = 0 OR len(b.answers) = 0 AS unanswered
                    FROM (SELECT * FROM batches WHERE batch = {batch})
                    JOIN candidates AS a ON a.number = later JOIN candidates AS b ON b.number = earlier
                )
                SELECT one, other, shared FROM compared
                WHERE common / (total - common) >= {threshold}
                    AND (unanswered OR common_answers / (total_answers - common_answers) >= {threshold})
            """)

    def _find_known(self, *, near: bool) -> None:
        """Fill `known_texts` with the texts that earlier runs have, or, if `near`, have nearly."""
        similar = "UNION ALL SELECT one, source, ' has a near duplicate' FROM alike JOIN known ON known.text = other"
        self.db.execute(f"""
            CREATE TABLE known_texts AS
                SELECT text, min_by(owner || what, (what, source)) AS reason
                FROM (SELECT text, source, ' has it' AS what FROM known {similar if near else ""})
                JOIN owners USING (source) GROUP BY text
        """)

    def _find_duplicates(self, duplicates: DuplicateSettings) -> None:
        """Fill `decisions`: find duplicates within the limits of the sources, and refuse prompts past them."""
        past = " OR ".join(f"source = {source} AND number >= {cut}" for source, cut in self.cuts.items()) or "false"
        self.db.execute(f"""
            CREATE OR REPLACE TABLE decisions AS
                SELECT prompts.*, known_texts.reason FROM prompts LEFT JOIN known_texts USING (text) WHERE NOT ({past});
            CREATE OR REPLACE VIEW kept AS SELECT * FROM decisions WHERE reason IS NULL
        """)
        column, reason = _unique(duplicates)
        first = f"(SELECT {column}, min(number) AS first FROM kept GROUP BY {column})"
        self._refuse("number > first", f"repeating('{reason}', first, source_start)", f"JOIN {first} USING ({column})")
        if duplicates.near:
            self._store("near", self._near_duplicates())
            self._refuse("later = number", f"repeating('{NEAR}', earlier, source_start)", "JOIN near ON later = number")
        self.db.execute(f"INSERT INTO decisions SELECT *, '{SOURCE_LIMIT}' FROM prompts WHERE {past}")

    def _near_duplicates(self) -> pyarrow.Table:
        """Return the dropped prompts, each with the earlier kept prompt that it repeats."""
        pairs = self.db.execute("""
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
            CREATE OR REPLACE TABLE decisions AS
            SELECT decisions.* REPLACE (
                CASE WHEN reason IS NULL AND {condition} THEN {reason} ELSE reason END AS reason
            )
            FROM decisions {f"LEFT {join}" if join else ""}
        """)

    def _first_past(self, limit: int, condition: str = "true") -> int | None:
        """Return the number of the kept prompt after the first `limit`, None if there are no more."""
        query = f"SELECT number FROM kept WHERE {condition} ORDER BY number LIMIT 1 OFFSET {limit}"
        found = self.db.execute(query).fetchone()
        return found[0] if found else None

    def kept(self, sources: int) -> list[int]:
        """Count the kept prompts of each source."""
        counts = self.db.execute("SELECT source, count(*) FROM kept GROUP BY source").fetchall()
        return [dict(counts).get(source, 0) for source in range(sources)]

    def refused(self, source: int) -> Counter[str]:
        """Count the reasons against prompts of a source."""
        query = "SELECT reason, count(*) FROM decisions WHERE reason IS NOT NULL AND source = ? GROUP BY reason"
        return Counter(dict(self.db.execute(query, [source]).fetchall()))

    def other_modes(self, bands: int) -> int:
        """Count the kept prompts with a question that another one has in another mode, but for the first of each."""
        question = f"hash({', '.join(band_names(bands))})"
        [[number]] = self.db.execute(f"""
            SELECT count(DISTINCT hash(question, mode_hash)) - count(DISTINCT question)
            FROM (SELECT {question} AS question, mode_hash FROM scanned SEMI JOIN kept USING (number))
        """).fetchall()
        return number

    def draw(self, mix: TrafficMix, sample: Counter[int]) -> dict:
        """Keep the number of prompts of each cell that the mix wants, by a hash of text and seed; return its report."""
        counts = self.db.execute("SELECT cell, count(*) FROM kept GROUP BY cell").fetchall()
        wanted, report = mix.choose(dict(counts), sample=sample)
        self._store("wanted", pyarrow.table({"cell": list(wanted), "wanted": list(wanted.values())}))
        self.db.execute(f"""
            CREATE TABLE undrawn AS
            SELECT number FROM kept JOIN wanted USING (cell)
            QUALIFY row_number() OVER (PARTITION BY cell ORDER BY md5(concat(text, ':{mix.seed}')), number) > wanted
        """)
        self._refuse("undrawn.number IS NOT NULL", f"'{MIX}'", "JOIN undrawn ON undrawn.number = decisions.number")
        return report

    def limit(self, limit: int) -> None:
        """Keep the first `limit` prompts."""
        if (past := self._first_past(limit)) is not None:
            self._refuse(f"number >= {past}", f"'{LIMIT}'")

    def hold_out(self, wanted: int, duplicates: DuplicateSettings, seed: int) -> int:
        """Hold out up to `wanted` of the kept prompts, in groups of related questions; return their number.

        Groups are drawn by a hash of text and seed.

        Prompts of one question in several modes, or with several answers, are one group, and so are a chain of near
        duplicates, and conversations that begin with the same questions. A group that is larger than the number that is
        still missing is left to the training.
        """
        self._find_similar("related", "SELECT text, number FROM kept", duplicates, within_modes=False)
        self._store("roots", self._roots())
        groups = self.db.execute(f"""
            CREATE TABLE grouped AS
                SELECT number, coalesce(root, text) AS root FROM kept LEFT JOIN roots USING (text);
            SELECT root, count(*) FROM grouped GROUP BY root ORDER BY md5(concat(root, ':{seed}')), root
        """)
        drawn, missing = array("Q"), wanted
        while missing and (rows := groups.fetchmany(10_000)):
            for root, size in rows:
                if size <= missing:
                    missing -= size
                    drawn.append(root)
        self._store("drawn", pyarrow.table({"root": pyarrow.array(drawn, pyarrow.uint64())}))
        join = "JOIN (SELECT number AS held FROM grouped SEMI JOIN drawn USING (root)) ON number = held"
        self._refuse("held IS NOT NULL", f"'{HELD_OUT}'", join)
        return wanted - missing

    def _roots(self) -> pyarrow.Table:
        """Return the texts that are related or have the same opening, each with the smallest text of its group."""
        root: dict[int, int] = {}

        def find(text: int) -> int:
            while (above := root.setdefault(text, text)) != text:
                root[text] = root[above]
                text = above
            return text

        pairs = self.db.execute("""
            SELECT one, other FROM related
            UNION ALL
            SELECT text_hash AS one, min(text_hash) OVER (PARTITION BY opening_hash) AS other
            FROM scanned SEMI JOIN kept USING (number) QUALIFY one <> other
        """)
        while rows := pairs.fetchmany(10_000):
            for one, other in rows:
                first, second = sorted((find(one), find(other)))
                root[second] = first
        texts, roots = array("Q", root), array("Q", map(find, root))
        return pyarrow.table(
            {"text": pyarrow.array(texts, pyarrow.uint64()), "root": pyarrow.array(roots, pyarrow.uint64())}
        )

    def reasons(self, chunk: int, *, held_out: bool = False) -> dict[int, str]:
        """Return the reasons for refusing prompts of a chunk, by their row in it: from those to train on, or from those
        that are held out.
        """
        other = f"CASE WHEN reason IS NULL THEN '{NOT_HELD_OUT}' ELSE nullif(reason, '{HELD_OUT}') END"
        why = other if held_out else "reason"
        return dict(self._of_chunk(chunk, f"SELECT number, {why} AS why FROM decisions WHERE why IS NOT NULL"))

    def repeated_ids(self, chunk: int) -> set[int]:
        """Return the prompts of a chunk, kept or held out, whose id an earlier one of them has, by their row in it."""
        self.db.execute(f"""
            CREATE TABLE IF NOT EXISTS repeated AS
                SELECT number FROM decisions WHERE reason IS NULL OR reason = '{HELD_OUT}'
                QUALIFY row_number() OVER (PARTITION BY id ORDER BY number) > 1
        """)
        return {row for row, _ in self._of_chunk(chunk, "SELECT number, NULL FROM repeated WHERE true")}

    def _of_chunk(self, chunk: int, query: str) -> list[tuple[int, Any]]:
        """Return number and value of each prompt of a chunk that a query with these columns finds, by its row there."""
        start, end = self.starts[chunk], self.starts[chunk + 1]
        found = self.db.execute(f"{query} AND number >= ? AND number < ?", [start, end]).fetchall()
        return [(number - start, value) for number, value in found]


def _unique(duplicates: DuplicateSettings) -> tuple[str, str]:
    """Return the columns whose values must be unique, and the reason for refusing repetitions.

    Other prompts with the same id are kept: shards of one data set may all count from 0.
    """
    if duplicates.exact:
        return "text", EXACT
    return ("text", NEAR) if duplicates.near else ("id, text", ID)
