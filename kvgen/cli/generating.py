"""Shows one generation: its text as it comes, its documents, its table and its exit code."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvgen.cli.interrupts import INTERRUPTED
from kvgen.errors import DisagreementError, InputError

if TYPE_CHECKING:
    from kvgen.cli.streams import Output
    from kvgen.measure.run import GenerationRun

logger = logging.getLogger("kvgen")


class Format(str, Enum):
    """What stdout carries."""

    text = "text"
    json = "json"
    jsonl = "jsonl"


@dataclass
class View:
    """How one run is shown."""

    output: Output
    form: Format
    trace: bool
    quiet: bool
    table: bool

    def show(self, run: GenerationRun) -> int:
        """Drive the run to its end or to Ctrl-C; returns the exit code."""
        from kvgen.models.failures import is_out_of_memory

        interrupted = False
        try:
            self._stream(run)
        except KeyboardInterrupt:
            interrupted = True
            self._text(run.interrupted())
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._text(run.interrupted("memory"))
        if self.form is Format.text:
            self.output.end_line()
        try:
            record = run.finish()
        except KeyboardInterrupt:
            interrupted = True
            run.record.finish_reason = "interrupted"
            record = run.finish()
        self._result(run)
        self.output.close()
        if self.table:
            from kvgen.cli.streams import error_console
            from kvgen.report.table import print_generation

            # The text is out; that the table found no room makes no failure of it.
            with contextlib.suppress(OSError):
                print_generation(record, error_console(), self.trace)
        if record.kept is not None and record.kept.error is not None:
            # Also with --quiet: the next run would silently compute everything again.
            logger.error(
                "%s was not written and is as it was: %s", record.kept.file, record.kept.error
            )
        if interrupted:
            return INTERRUPTED
        if record.finish_reason == "memory":
            count, positions = len(record.steps), record.prompt_tokens + len(record.steps)
            raise InputError(
                f"out of memory after {count:,} new tokens, at {positions:,} in all; the text so "
                "far stands. A shorter context, --cache int8 or --prefill-chunk 256 needs less"
            )
        if record.check is not None and record.check.verdict == "broken":
            from kvgen.report.table import check_line

            raise DisagreementError(f"cached and uncached disagree: {check_line(record)}")
        return 0

    def _stream(self, run: GenerationRun) -> None:
        if self.form is Format.jsonl:
            from kvgen.report import document

            self._line(document.run_line(run.record))
            for _ in run.pieces():
                self._line(document.step_line(run.record.steps[-1]))
            return
        for piece in run.pieces():
            self._text(piece)

    def _result(self, run: GenerationRun) -> None:
        from kvgen.report import document

        if self.form is Format.json:
            self._line(document.generation_document(run.record), indent=2)
        elif self.form is Format.jsonl:
            self._line(document.result_line(run.record))

    def _text(self, piece: str) -> None:
        if self.form is Format.text and piece:
            self.output.write(piece)

    def _line(self, data: dict[str, object], indent: int | None = None) -> None:
        from kvgen.report.document import to_json

        self.output.write(to_json(data, indent) + "\n")
