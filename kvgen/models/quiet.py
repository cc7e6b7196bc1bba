"""Keeps transformers and huggingface_hub off stderr while kvgen loads. Heavy imports inside."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Silence what the Hub library says of its retries; imports nothing heavy."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def hide_kernel_advice() -> None:
    """Do not name packages whose kernels would be faster; for the CPU, which none of them serves.

    transformers 5.5 says it while loading, where it is silenced anyway.
    """
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence progress bars, reports and warnings of the libraries; their errors still show.

    What those messages say about missing weights and the like, kvgen checks for itself and reports
    in its own words. Every setting is put back afterwards.
    """
    import huggingface_hub.utils as hub_utils
    from transformers.utils import logging as transformers_logging

    hub: Any = hub_utils  # it exports these names without saying so to type checkers
    verbosity = transformers_logging.get_verbosity()
    transformers_bars = transformers_logging.is_progress_bar_enabled()
    hub_bars = not hub.are_progress_bars_disabled()
    with quiet_hub(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            transformers_logging.set_verbosity_error()
            transformers_logging.disable_progress_bar()
            hub.disable_progress_bars()
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            if transformers_bars:
                transformers_logging.enable_progress_bar()
            if hub_bars:
                hub.enable_progress_bars()
            else:
                hub.disable_progress_bars()
