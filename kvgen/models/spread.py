"""Dividing a model over ranks or devices, by transformers' own means. Heavy imports inside.

``tensor``: every rank holds a share of each matrix, by the plan that comes with the model.
``auto``: whole layers lie on the devices of this machine, as accelerate places them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvgen.errors import ModelError, UsageError
from kvgen.models.ranks import current
from kvgen.models.types import LoadOptions, Spread

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_spread(options: LoadOptions) -> None:
    """Raise ``UsageError`` where this run cannot divide a model as asked."""
    if options.spread == "none":
        return
    asked = "--parallel tensor" if options.spread == "tensor" else "--device-map auto"
    if options.load_format == "dummy":
        raise UsageError(f"{asked} divides weights as they are read; leave out --load-format dummy")
    if find_spec("accelerate") is None:
        raise UsageError(
            f'{asked} needs the package accelerate; install it with: pip install "kvgen[parallel]"'
        )
    ranks = current()
    where = ranks.device if ranks is not None and options.spread == "tensor" else "auto"
    if options.device not in ("auto", where, where.partition(":")[0]):
        raise UsageError(
            f"{asked} chooses the devices itself; leave out --device {options.device}"
            + ("" if where == "auto" else f", as this rank's is {where}")
        )


def spread_arguments(spread: Spread, config: PreTrainedConfig, name: str) -> dict[str, Any]:
    """What ``from_pretrained`` must be told. Raises ``ModelError`` for a model without a plan."""
    if spread == "none":
        return {}
    if spread == "auto":
        return {"device_map": "auto"}
    decoder = config.get_text_config(decoder=True)
    if not getattr(decoder, "base_model_tp_plan", None):
        raise ModelError(
            f"{name}: transformers has no tensor-parallel plan for {config.model_type}; run it in "
            "one process, or spread its layers with --device-map auto"
        )
    from transformers.distributed import DistributedConfig

    # Earlier releases took the plan as an argument of its own.
    if "tp_plan" in DistributedConfig.__dataclass_fields__:
        return {"distributed_config": DistributedConfig(tp_plan="auto")}
    return {"tp_plan": "auto"}
