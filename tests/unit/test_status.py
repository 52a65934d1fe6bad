"""The table of docs/status.md has the contents of the recorded files.

To write it anew: `UPDATE_TABLES=1 python -m pytest tests/unit/test_status.py`.
"""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import msgspec

from tests.doc_tables import assert_written

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "status.md"
TABLE = re.compile(r"(?<=<!-- status -->\n).*(?=<!-- end -->)", re.DOTALL)
NEVER_RUN = "never run"


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """The last run of an environment."""

    environment: str
    checks: str
    commit: str | None
    date: date | None
    result: str
    note: str


def records() -> list[Record]:
    files = sorted((DOCS / "status").iterdir())
    assert files
    return [msgspec.json.decode(file.read_bytes(), type=Record) for file in files]


def table(found: list[Record]) -> str:
    lines = ["| environment | checks | commit | date | result | |", "| --- | --- | --- | --- | --- | --- |"]
    for record in found:
        run = (record.checks, record.commit or "", str(record.date or ""), record.result, record.note)
        lines.append(f"| {record.environment} | {' | '.join(run)} |")
    return "\n".join(lines) + "\n"


def test_the_table_is_what_the_files_say() -> None:
    assert_written(PAGE, TABLE.sub(lambda _: table(records()), PAGE.read_text()))


def test_every_run_has_a_commit_and_a_date_and_what_was_never_run_has_none() -> None:
    for record in records():
        if record.result == NEVER_RUN:
            assert (record.commit, record.date) == (None, None), record.environment
        else:
            assert re.fullmatch(r"passed|failed: .+", record.result), record.environment
            assert re.fullmatch("[0-9a-f]{7,40}", record.commit or ""), record.environment
            assert record.date is not None, record.environment
            assert record.checks, record.environment
