"""Both shapes of a forward run once before anything is timed, which is also a first proof."""

from __future__ import annotations

from kvgen.cache.manager import KVCache
from kvgen.engine.decoder import Decoder
from kvgen.engine.forward import Forward
from kvgen.engine.sampling import Sampler, SamplingOptions
from kvgen.errors import DisagreementError
from kvgen.measure.verdict import compare_step, judge, largest_logit, lossy_tolerance, tolerance
from kvgen.models import LoadedModel


def warm_up(
    loaded: LoadedModel, forward: Forward, ids: list[int], cache: KVCache | None = None
) -> None:
    """A few of ``ids`` together, then one token alone, on an empty ``cache`` that is not used on.

    With a cache, raises ``DisagreementError`` before any text is shown when the model predicts
    otherwise with it than without.
    """
    decoder = Decoder(forward, ids[:8], Sampler(SamplingOptions()), cache)
    decoder.step()
    token = decoder.step()
    if cache is None:
        return
    logits = forward.uncached(decoder.ids[:-1])
    largest = largest_logit(logits)
    limit = tolerance(loaded.dtype_name, largest)
    change = loaded.rotary_change
    rescaled_from = 0 if change is not None and len(decoder.ids) > change else None
    lossy = lossy_tolerance(cache.policy.tolerance, largest)
    check = judge([compare_step(1, token.logits, logits)], limit, rescaled_from, lossy)
    if check.verdict == "broken":
        config = loaded.config
        why = "it does not attend causally, or keeps a state that no cache reaches"
        if getattr(config, "is_decoder", None) is False:
            why = "its configuration says is_decoder = false, so it attends in both directions"
        raise DisagreementError(
            f"{config.model_type} predicts otherwise with a cache than without (max |Δlogit| "
            f"{check.max_abs_logit_difference:.1e}): {why}; run it without one: --no-cache"
        )
