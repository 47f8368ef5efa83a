"""Results that a file keeps: a row is computed once."""

from pathlib import Path

import msgspec

from loadgen.lab.apart.runs import Job, Row, run


class Kept:
    def __init__(self, file: Path) -> None:
        self._file = file

    def row(self, job: Job) -> Row:
        """The row of this job, from the file or computed now; several processes may share it."""
        lines = self._file.read_bytes().splitlines() if self._file.exists() else []
        for line in lines:
            row = msgspec.json.decode(line, type=Row)
            if row.job == job:
                return row
        row = run(job)
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        return row
