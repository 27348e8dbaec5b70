"""Steps of a timer's log that tells none: by the outermost spans, whose names come again in each step."""

from __future__ import annotations

from profiler_wrapper.recording.span_database import Database, literal

_LONGEST = 80  # of a name, in what is told

# Outermost spans of each rank's main thread, that with the most time in them.
_OUTERMOST = """
    outermost AS (
        SELECT rank, thread, name, kind, start_ns, start_ns + duration_ns AS end_ns FROM ({spans})
        WHERE depth = 0 AND kind NOT IN ('gc', 'step')),
    main AS (
        SELECT rank, arg_max(thread, busy_ns) AS thread FROM (
            SELECT rank, thread, sum(end_ns - start_ns) AS busy_ns FROM outermost GROUP BY rank, thread) GROUP BY rank),
    mine AS (SELECT o.* FROM outermost o JOIN main m ON o.rank = m.rank AND o.thread IS NOT DISTINCT FROM m.thread)
"""


def with_steps(database: Database, spans: str) -> str | None:
    """Makes the view `spans` of a SELECT of spans without steps, with steps where they can be found: how they were.

    A step begins where the first of the outermost names that come again comes again. Where that comes several times
    before the optimizer does, as with accumulated gradients, a step begins with the first of them after the optimizer.
    What is before the first step is in none. The last one ends with its last span.

    Returns: None where no name of most ranks comes again; the view has no steps then.
    """
    outermost = _OUTERMOST.format(spans=spans)
    names = database.execute(
        f"""WITH {outermost},
        repeated AS (
            SELECT rank, name, any_value(kind) AS kind, count(*) AS times, min(start_ns) AS first_ns
            FROM mine GROUP BY rank, name HAVING count(*) > 1),
        first AS (SELECT rank, arg_min(name, first_ns) AS name FROM repeated GROUP BY rank),
        chosen AS (SELECT name FROM first GROUP BY name ORDER BY count(*) DESC, name LIMIT 1)
        SELECT name, kind, median(times) FROM repeated
        WHERE name = (SELECT name FROM chosen) OR kind = 'optimizer'
        GROUP BY name, kind ORDER BY name = (SELECT name FROM chosen) DESC, median(times), name"""
    ).fetchall()
    if not names:
        return None
    (first, _, times), others = names[0], names[1:]
    closing = next((name for name, kind, count in others if kind == "optimizer" and 2 * count <= times), None)
    place = "start_ns" if closing is None else "closed"  # what those of one step have in common
    database.execute(
        f"""CREATE OR REPLACE TABLE step_cuts AS
        WITH {outermost},
        begins AS (
            SELECT rank, thread, start_ns, {place} AS place FROM (
                SELECT *, sum((name = {literal(closing or "")})::INTEGER) OVER (
                    PARTITION BY rank ORDER BY start_ns ROWS UNBOUNDED PRECEDING) AS closed FROM mine)
            WHERE name = {literal(first)}),
        firsts AS (
            SELECT rank, any_value(thread) AS thread, min(start_ns) AS begin_ns FROM begins GROUP BY rank, place),
        ends AS (SELECT rank, max(end_ns) AS end_ns FROM mine GROUP BY rank)
        SELECT rank, thread, begin_ns, row_number() OVER steps - 1 AS step,
            coalesce(lead(begin_ns) OVER steps, e.end_ns) AS end_ns
        FROM firsts JOIN ends e USING (rank) WINDOW steps AS (PARTITION BY rank ORDER BY begin_ns)"""
    )
    database.execute(
        f"""CREATE OR REPLACE VIEW spans AS
        SELECT s.* REPLACE (c.step AS step) FROM ({spans}) s
        ASOF LEFT JOIN step_cuts c ON s.rank = c.rank AND s.start_ns >= c.begin_ns
        UNION ALL BY NAME
        SELECT rank, step, 'step' AS name, 'step' AS kind, begin_ns AS start_ns, end_ns - begin_ns AS duration_ns,
            0::SMALLINT AS depth, thread FROM step_cuts"""
    )
    how = f"steps were found by the repetition of {first[:_LONGEST]}"
    how += f": each begins with the first one after {closing[:_LONGEST]}" if closing else ", with which each begins"
    return f"{how}; global_timer.step() tells them"
