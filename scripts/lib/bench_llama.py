"""llama.cpp for scripts/bench, where `llama-cpp-python` is installed; kvgen never needs it.

It reads a GGUF file of its own making: the default model's, with the same weights written in the
dtype that is measured. Its keys and values are float16, as is its default.
"""

from __future__ import annotations

import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

MISSING = "llama.cpp is not measured: pip install llama-cpp-python (it is built on this machine)"


class Timed(NamedTuple):
    """Seconds per token, the median and half the interquartile range; the logits at the end."""

    median_s: float
    spread_s: float
    logits: Any


def is_installed() -> bool:
    """Whether llama.cpp can be measured."""
    return find_spec("llama_cpp") is not None


def measure(
    gguf_file: Path, dtype: str, runs: list[tuple[list[int], list[int]]], times: int
) -> list[Timed]:
    """For each of ``runs``, a context and the ids forced after it: a step per id, ``times`` runs,
    and the logits ``[vocab]`` after the last.
    """
    import llama_cpp
    import numpy
    import torch

    found = []
    with tempfile.TemporaryDirectory(prefix="kvgen-bench-") as folder:
        file = Path(folder) / "model.gguf"
        write_as(gguf_file, file, dtype)
        threads = torch.get_num_threads()
        model = llama_cpp.Llama(
            str(file),
            n_ctx=max(len(context) + len(ids) for context, ids in runs),
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        for context, ids in runs:
            latencies = []
            for _ in range(times):
                model.reset()
                model.eval(context)
                for token in ids:
                    begin = time.perf_counter()
                    model.eval([token])
                    latencies.append(time.perf_counter() - begin)
            pointer = llama_cpp.llama_get_logits_ith(model.ctx, -1)
            logits = numpy.ctypeslib.as_array(pointer, shape=(model.n_vocab(),)).copy()
            low, middle, high = quantiles(latencies, n=4)
            found.append(Timed(middle, (high - low) / 2, torch.from_numpy(logits)))
        model.close()
    return found


def write_as(source: Path, target: Path, dtype: str) -> None:
    """Copy a GGUF file, its matrices in ``dtype``."""
    import gguf
    from gguf.quants import dequantize, quantize

    kind = {
        "float32": gguf.GGMLQuantizationType.F32,
        "bfloat16": gguf.GGMLQuantizationType.BF16,
        "float16": gguf.GGMLQuantizationType.F16,
    }[dtype]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type)
        wanted = kind if numbers.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(numbers, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
