"""Drives a comparison: progress, exports after every row, the result, and the exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvgen.cli.interrupts import INTERRUPTED
from kvgen.cli.options import use_threads
from kvgen.cli.parallel import speaks
from kvgen.cli.progress import loading, measuring
from kvgen.cli.streams import Output, check_target
from kvgen.errors import DisagreementError, GateError, InputError, UsageError
from kvgen.report.document import to_json
from kvgen.report.exporters import EXPORTERS, exporter_for, json_lines, markdown, text
from kvgen.report.plot import check_plot, draw
from kvgen.report.rows import Titled, disagreements
from kvgen.storage import write_atomically

if TYPE_CHECKING:
    from kvgen.measure.compare import ComparisonRun
    from kvgen.measure.comparison_records import Comparison
    from kvgen.measure.gates import GateOptions
    from kvgen.measure.setup import CompareOptions
    from kvgen.models import LoadOptions


@dataclass(frozen=True)
class Targets:
    """Where results go."""

    form: str
    exports: tuple[Path, ...] = ()
    plots: tuple[Path, ...] = ()
    tokens: Path | None = None

    def check(self) -> None:
        """Raise ``UsageError`` for a target that could not be written, before hours of work."""
        for path in self.exports:
            exporter_for(path)
        for path in self.plots:
            check_plot(path)
        files = [*self.exports, *self.plots, *([self.tokens] if self.tokens else [])]
        for path in files:
            check_target(path)
        if len({path.absolute() for path in files}) < len(files):
            raise UsageError("two results would be written to one file; name each file once")

    def write(self, runs: list[Titled]) -> None:
        """Bring every export up to date, each file whole at any moment."""
        for path in self.exports:
            _write(path, exporter_for(path)(runs))

    def draw(self, runs: list[Titled]) -> None:
        """Draw the plots."""
        for path in self.plots:
            try:
                draw(path, runs)
            except OSError as error:
                raise InputError(f"cannot write {path}: {error.strerror}") from error


@dataclass
class Comparing:
    """One ``kvgen compare``, command line read."""

    load: LoadOptions
    options: CompareOptions
    gates: GateOptions
    targets: Targets
    threads: int | None
    quiet: bool
    steps: bool
    chart: bool

    def run(self) -> int:
        """Measure, show, and judge; returns the exit code.

        Raises ``DisagreementError`` when a contestant is broken, else ``GateError`` when a gate
        failed; everything is written by then.
        """
        output = Output(None, sys.stdout)
        interrupted = False
        # Whatever a library prints must not end up in a document.
        with contextlib.redirect_stdout(sys.stderr):
            run = self._prepare()
            try:
                self._measure(run, output)
            except KeyboardInterrupt:
                interrupted = True
                run.interrupted()
            record = run.record
            if not interrupted:
                from kvgen.measure.gates import evaluate

                record.gates = evaluate(record, self.gates)
            self._finish(record, output)
        if interrupted:
            return INTERRUPTED
        if record.broken:
            raise DisagreementError("; ".join(disagreements(record)))
        failed = [gate.message for gate in record.gates if not gate.passed]
        if failed:
            raise GateError("; ".join(failed))
        return 0

    def _prepare(self) -> ComparisonRun:
        from kvgen.cache.policies import DEFAULT, find_policy
        from kvgen.measure.gates import check_baseline
        from kvgen.measure.guard import Demand, check_before_loading, check_heads
        from kvgen.measure.setup import prepare
        from kvgen.models import load_model

        use_threads(self.threads)
        check_heads(self.load)
        if not self.options.force:
            # A given prompt's tokens are not known yet; what is known must fit already.
            tokens = max(self.options.depths) + self.options.prompt_tokens + self.options.new_tokens
            demand = Demand(tokens, find_policy(DEFAULT), chunk=1)
            check_before_loading(self.load, demand)
        with loading(self.quiet) as progress:
            loaded = load_model(self.load, progress)
            run = prepare(
                loaded,
                self.options,
                lambda dtype: load_model(replace(self.load, dtype=dtype), progress),
                progress=progress,
                load_plain=lambda: load_model(replace(self.load, tune="off"), progress),
            )
        if self.gates.baseline is not None:
            run.record.warnings += check_baseline(run.record, self.gates.baseline)
        return run

    def _measure(self, run: ComparisonRun, output: Output) -> None:
        with measuring(self.quiet) as progress:
            run.report_to(progress)
            for _ in run.rows():
                self.targets.write([Titled("", run.record)])
                if self.targets.form == "jsonl":
                    _lines(output, run.record, len(run.record.rows) - 1, end=False)

    def _finish(self, record: Comparison, output: Output) -> None:
        runs = [Titled("", record)]
        self.targets.write(runs)
        if self.targets.tokens is not None:
            from kvgen.measure.tokens import tokens_document

            document = tokens_document(record.model.name, record.rows)
            _write(self.targets.tokens, to_json(document) + "\n")
        if record.rows:
            self.targets.draw(runs)
        form = self.targets.form
        if form == "text":
            output.write(text(runs, self.steps, self.chart))
        elif form == "jsonl":
            shown = len(record.rows) if record.complete else self._shown_rows(record)
            _lines(output, record, shown, end=True)
        else:
            output.write(EXPORTERS[form](runs))
        if form != "text" and not self.quiet:
            for warning in record.warnings:
                print(f"kvgen: {warning}", file=sys.stderr)
        _add_job_summary(runs)

    def _shown_rows(self, record: Comparison) -> int:
        """Rows that were finished, and therefore shown, before an interruption."""
        whole = len(record.contestants) * record.repetitions
        counts = [sum(run.depth == row.depth for run in record.runs) for row in record.rows]
        return sum(count == whole for count in counts)


def _lines(output: Output, record: Comparison, from_row: int, end: bool) -> None:
    for line in json_lines(record, from_row, end):
        output.write(to_json(line) + "\n")


def _write(path: Path, content: str) -> None:
    try:
        write_atomically(path, content)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def _add_job_summary(runs: list[Titled]) -> None:
    """Append to the page that GitHub Actions shows for a job, where there is one."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path or not speaks():
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(markdown(runs) + "\n")
    except OSError as error:
        print(f"kvgen: cannot add to the job summary: {error.strerror}", file=sys.stderr)
