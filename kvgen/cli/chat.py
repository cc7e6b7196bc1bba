"""``kvgen chat``: a conversation on one cache, in which each turn computes only its new tokens."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

from kvgen.cli import options as shared
from kvgen.cli.interrupts import preparing
from kvgen.cli.options import option, use_threads
from kvgen.cli.parallel import one_process

if TYPE_CHECKING:
    from kvgen.engine.conversation import ChatOptions
    from kvgen.measure.turns import MeasuredConversation
    from kvgen.models import LoadOptions


class ChatFormat(str, Enum):
    """What stdout carries."""

    text = "text"
    jsonl = "jsonl"


class Overflow(str, Enum):
    """What happens when the context is full."""

    stop = "stop"
    drop_oldest = "drop-oldest"


_TOKENS, _OUTPUT = "Tokens", "Output"


def chat(
    model: shared.ModelOption = None,
    revision: shared.RevisionOption = None,
    dtype: shared.DtypeOption = shared.Dtype.auto,
    device: shared.DeviceOption = "auto",
    attention: shared.AttentionOption = shared.AttentionMode.auto,
    tune: shared.TuneOption = shared.Tune.auto,
    threads: shared.ThreadsOption = None,
    load_format: shared.LoadFormatOption = shared.LoadFormat.auto,
    trust_remote_code: shared.TrustRemoteCodeOption = False,
    offline: shared.OfflineOption = False,
    force: shared.ForceOption = False,
    system: Annotated[
        str | None, option("--system", help="System message.", rich_help_panel=_TOKENS)
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        option(
            "--max-new-tokens",
            "-n",
            min=1,
            help="At most this many tokens per answer (default 512, or what fits).",
            rich_help_panel=_TOKENS,
        ),
    ] = None,
    temperature: shared.TemperatureOption = 0.0,
    top_k: shared.TopKOption = None,
    top_p: shared.TopPOption = None,
    min_p: shared.MinPOption = None,
    repetition_penalty: shared.RepetitionPenaltyOption = 1.0,
    seed: shared.SeedOption = None,
    stop: shared.StopOption = None,
    parse_special: shared.ParseSpecialOption = False,
    context_overflow: Annotated[
        Overflow,
        option(
            "--context-overflow",
            help="When the context is full: refuse, or drop the oldest turns and compute anew.",
            rich_help_panel=_TOKENS,
        ),
    ] = Overflow.stop,
    cache: shared.CacheOption = None,
    prefill_chunk: shared.PrefillChunkOption = None,
    output_format: Annotated[
        ChatFormat,
        option("--format", "-f", help="What stdout carries.", rich_help_panel=_OUTPUT),
    ] = ChatFormat.text,
    no_stats: Annotated[
        bool, option("--no-stats", help="No receipt after each turn.", rich_help_panel=_OUTPUT)
    ] = False,
    quiet: shared.QuietOption = False,
    debug: shared.DebugOption = False,
    config: shared.ConfigOption = None,
) -> int:
    """Talk with a model; each turn computes only the tokens that are new.

    Every line of stdin is one message; /help lists commands. stdout carries the
    answers, stderr a receipt for each: tokens submitted, reused, computed.
    """
    from kvgen.cli.chatting import Chat
    from kvgen.cli.lines import Lines
    from kvgen.cli.streams import Output

    one_process()
    with preparing():
        # The heavy imports start here, once the command line is known to be right.
        from kvgen.cache.policies import DEFAULT
        from kvgen.engine.conversation import ChatOptions
        from kvgen.engine.conversation_file import ConversationFiles
        from kvgen.engine.sampling import SamplingOptions
        from kvgen.models import LoadOptions

        options = ChatOptions(
            system=system,
            max_new_tokens=max_new_tokens,
            sampling=SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty, seed),
            stop=tuple(stop or ()),
            cache=cache or DEFAULT,
            prefill_chunk=prefill_chunk,
            overflow=context_overflow.value,
            parse_special=parse_special,
            force=force,
        )
        load = LoadOptions(
            model=model,
            revision=revision,
            dtype=dtype.value,
            device=device,
            attention=attention.value,
            tune=tune.value,
            trust_remote_code=trust_remote_code,
            offline=offline,
            load_format=load_format.value,
        )
        measured = _prepare(load, options, threads, quiet)
    lines = Lines()
    session = Chat(
        measured,
        Output(None),
        lines,
        jsonl=output_format is ChatFormat.jsonl,
        receipts=not (quiet or no_stats),
        files=ConversationFiles(measured.conversation),
    )
    if lines.interactive and not quiet:
        session.greet()
    return session.run()


def _prepare(
    load: LoadOptions, options: ChatOptions, threads: int | None, quiet: bool
) -> MeasuredConversation:
    """Everything before the first question."""
    from kvgen.cache.policies import find_policy
    from kvgen.cli.progress import loading
    from kvgen.engine.conversation import DEFAULT_NEW_TOKENS, Conversation
    from kvgen.measure.guard import Demand, check_before_loading
    from kvgen.measure.turns import MeasuredConversation
    from kvgen.models import load_model

    use_threads(threads)
    policy = find_policy(options.cache)
    if not options.force:
        demand = Demand(options.max_new_tokens or DEFAULT_NEW_TOKENS, policy, chunk=1)
        check_before_loading(load, demand)
    with loading(quiet) as progress:
        return MeasuredConversation(Conversation(load_model(load, progress), options))
