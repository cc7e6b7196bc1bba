"""What became of a prompt's tokens, in a few lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgen.measure.records import Kept, Reuse
from kvgen.report.units import bytes_text, counted, seconds_text, visible

if TYPE_CHECKING:
    from kvgen.measure.cache_file import FileFacts
    from kvgen.measure.file_check import FileCheck


def receipt_lines(reuse: Reuse, kept: Kept | None = None) -> list[str]:
    """Tokens submitted, reused and computed; where from, why not more, and what was kept."""
    first = (
        f"prompt: {counted(reuse.submitted, 'token')} submitted, {reuse.reused:,} reused, "
        f"{reuse.computed:,} computed"
    )
    if reuse.saved_s is not None:
        first += f"; {seconds_text(reuse.saved_s)} of prefill saved"
    lines = [first]
    if reuse.reused < reuse.matched:
        lines.append(f"{reuse.matched:,} matched, not all reused: {reuse.why_fewer}")
    if reuse.why_no_further is not None:
        lines.append(f"{reuse.matched:,} matched and no more: {reuse.why_no_further}")
    if reuse.file is not None:
        lines.append(_read(reuse))
    if kept is not None:
        lines.append(_written(kept))
    return lines


def _read(reuse: Reuse) -> str:
    if reuse.read_s is None or reuse.file_bytes is None or reuse.file_tokens is None:
        return f"{reuse.file} is not there yet"
    line = (
        f"read {reuse.file}: {counted(reuse.file_tokens, 'token')}, "
        f"{bytes_text(reuse.file_bytes)} in {seconds_text(reuse.read_s)}"
    )
    if reuse.identify_s is not None:
        line += f"; model identified in {seconds_text(reuse.identify_s)}"
    return line


def _written(kept: Kept) -> str:
    if kept.bytes is None or kept.write_s is None or kept.tokens is None:
        return f"not written: {kept.error or kept.why_not}"
    line = f"written: {counted(kept.tokens, 'token')}, {bytes_text(kept.bytes)} in "
    line += seconds_text(kept.write_s)
    if kept.snapshot:
        line += "; the cache one token before the prompt's end, as it cannot go back"
    return line


def file_lines(file: FileFacts) -> list[str]:
    """What a cache file holds: tokens, layers, bytes, fingerprint."""
    lines = [
        f"{file.path}: {counted(file.tokens, 'token')} of {file.model}, {bytes_text(file.bytes)}"
    ]
    for kind, (count, held) in file.layers.items():
        lines.append(f"  {count} x {kind}: {bytes_text(held)}")
    if file.snapshot:
        lines.append("  kept one token before its prompt's end, as it cannot go back")
    if file.seconds is not None:
        lines.append(f"  computing them took {seconds_text(file.seconds)}")
    lines += [f"  {name}: {value}" for name, value in file.fingerprint.items()]
    return [visible(line) for line in lines]


def file_check_lines(found: FileCheck) -> list[str]:
    """What holding a cache file against the model found."""
    lines = [f"{found.path}: {counted(found.tokens, 'token')} computed again"]
    if found.numbers is not None:
        lines.append(
            f"  stored numbers: off by {found.numbers.most:.1e} of the largest at most "
            f"({found.numbers.name}); {found.numbers.accepted:.1e} is accepted"
        )
    check = found.logits
    lines.append(
        f"  next token's logits: {check.verdict}, max |Δlogit| {check.max_abs_logit_difference:.1e}"
    )
    return [visible(line) for line in lines]
