"""A model name -> its files -> a loaded model and tokenizer.

Importing this loads neither torch nor transformers; loading a model does.
"""

from kvgen.models.load import load_model
from kvgen.models.names import DEFAULT_NAME, resolve
from kvgen.models.types import LoadedModel, LoadOptions, ModelSource, ProgressCallback

__all__ = [
    "DEFAULT_NAME",
    "LoadOptions",
    "LoadedModel",
    "ModelSource",
    "ProgressCallback",
    "load_model",
    "resolve",
]
