"""One run's dealings with a prompt-cache file: what it takes from there, and what it leaves.

Prints nothing. A file is written whole or not at all, and never one that was refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvgen.cache.disk import CacheFile
from kvgen.cache.fingerprint import Fingerprint, fingerprint
from kvgen.cache.manager import KVCache
from kvgen.cache.reuse import Receipt, goes_back, take_up
from kvgen.cache.saving import load_cache, open_for, save_cache
from kvgen.cache.trie import common_prefix
from kvgen.measure.clock import Clock
from kvgen.measure.records import Kept, Reuse
from kvgen.models import LoadedModel

SNAPSHOT_ONLY = (
    "a cache that cannot go back was kept as it was one token before its prompt's end, so no more "
    "than that is stored"
)
TEMPLATE = "the chat template has changed since the file was written"


class PromptCache:
    """A file for the cache of one loaded model under one policy."""

    def __init__(
        self,
        path: Path,
        writes: bool,
        loaded: LoadedModel,
        attention: str,
        cache: KVCache,
        clock: Clock,
    ) -> None:
        """Opens the file if it is there. It must have been made with the same model, ``attention``
        (its name), specs and policy as ``cache``, which is empty.

        Raises ``CacheFileError`` for a file that is damaged or belongs to something else.
        """
        self.path, self.writes = path, writes
        self._loaded, self._clock, self._cache = loaded, clock, cache
        self._attention = attention
        self._own: Fingerprint | None = None
        self._file: CacheFile | None = None
        self._rate: float | None = None
        self._held: list[int] = []
        self.identify_s: float | None = None
        if path.exists():
            own = self._fingerprint()
            with self._timed() as took:
                self._file = open_for(path, own)
                self._held = self._file.ids
            self._open_s = took[0]

    def take(self, prompt: list[int], chat: bool) -> Reuse:
        """Fill the cache with what the file holds of ``prompt``."""
        if self._file is None:
            return Reuse(len(prompt), 0, 0, len(prompt), file=str(self.path))
        header = self._file.header
        with self._timed() as took:
            receipt = self._taken(self._file, prompt)
        if header.seconds is not None and self._held:
            self._rate = header.seconds / len(self._held)
        reuse = Reuse.of(receipt, self._why_no_further(receipt.matched, prompt, chat))
        reuse.file, reuse.file_tokens = str(self.path), len(self._held)
        reuse.file_bytes = self._file.bytes
        reuse.read_s, reuse.identify_s = self._open_s + took[0], self.identify_s
        return reuse

    def wants_snapshot(self, tokens: int) -> bool:
        """Whether the cache must be copied before the prompt's last token, as it will not be able
        to go back there from its ``tokens`` tokens.
        """
        return self.writes and not goes_back(self._cache, tokens)

    def keep(
        self,
        kept: Kept,
        snapshot: KVCache | None,
        ids: list[int],
        reuse: Reuse,
        prefill_s: float | None,
    ) -> None:
        """Write the cache, or its ``snapshot`` if there is one, back to the file; fills ``kept``.

        ``ids`` are the prompt's and the new ones; ``prefill_s`` is what the computed prompt tokens
        took, ``None`` if not all were. A file that cannot be written is no error of the run, whose
        text stands: ``kept`` says so.
        """
        cache = self._cache if snapshot is None else snapshot
        if not cache.drop_unfinished():
            kept.why_not = "the run broke off within a forward, which cannot be taken back"
        elif ids[: cache.position] == self._held:
            kept.why_not = "it holds the same tokens already"
        elif cache.position <= reuse.reused:
            kept.why_not = "nothing was computed beyond what it holds"
        else:
            kept.why_not = "interrupted while it was written"  # until it is
            self._write(kept, cache, ids, self._seconds(cache.position, reuse, prefill_s))

    def _write(self, kept: Kept, cache: KVCache, ids: list[int], seconds: float | None) -> None:
        held, own = ids[: cache.position], self._fingerprint()
        name, snapshot = self._loaded.source.name, cache is not self._cache
        try:
            with self._timed() as took:
                kept.bytes = save_cache(self.path, cache, held, own, name, seconds, snapshot)
        except OSError as error:
            kept.why_not, kept.error = None, error.strerror or str(error)
            return
        kept.tokens, kept.snapshot, kept.why_not = cache.position, snapshot, None
        kept.write_s = took[0]

    def _taken(self, file: CacheFile, prompt: list[int]) -> Receipt:
        matched = common_prefix(self._held, prompt)
        refusal = self._other_rotary_base(len(prompt)) if matched else None
        if not matched or refusal is not None:
            file.check()  # it may be written to later, and what is damaged is left alone
            return Receipt(len(prompt), matched, 0, refusal)
        load_cache(file, self._cache, self._loaded.device)
        return take_up(self._cache, self._held, prompt, file.header.seconds)

    def _other_rotary_base(self, submitted: int) -> str | None:
        change = self._loaded.rotary_change
        if change is None or max(submitted, len(self._held)) <= change:
            return None
        return (
            f"past {change:,} tokens this model makes keys with another rotary base, and stored "
            "ones keep the base they were made with"
        )

    def _why_no_further(self, matched: int, prompt: list[int], chat: bool) -> str | None:
        assert self._file is not None
        header = self._file.header
        if matched == len(prompt):
            return None
        if matched == len(self._held):
            return SNAPSHOT_ONLY if header.snapshot and matched < len(prompt) - 1 else None
        if chat and header.fingerprint.chat_template != self._fingerprint().chat_template:
            return TEMPLATE
        return f"the prompt and what is stored differ from token {matched + 1:,} on"

    def _seconds(self, held: int, reuse: Reuse, prefill_s: float | None) -> float | None:
        """What forwarding ``held`` tokens takes, at the rate at which this prompt was computed.

        ``None`` where that was measured on too few of them: a forward of few tokens takes far
        longer per token than one of many.
        """
        measured = reuse.computed if self._rate is None else reuse.submitted
        if prefill_s is None or held > 2 * measured:
            return None
        prompt_s = prefill_s + (self._rate or 0.0) * reuse.reused
        return prompt_s / measured * held

    def _fingerprint(self) -> Fingerprint:
        if self._own is None:
            model, tokenizer = self._loaded.model, self._loaded.tokenizer
            specs, policy = self._cache.specs, self._cache.policy
            with self._timed() as took:
                self._own = fingerprint(model, tokenizer, specs, policy, self._attention)
            self.identify_s = took[0]
        return self._own

    @contextmanager
    def _timed(self) -> Iterator[list[float]]:
        """A list that holds the block's seconds after it."""
        took: list[float] = []
        begin = self._clock.now()
        yield took
        took.append(self._clock.now() - begin)
