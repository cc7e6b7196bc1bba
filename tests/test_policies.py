"""Storage policies: what they hold against a list of pairs, and their bytes against the formula."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layers import HEADS, KEY_DIM, VALUE_DIM, numbers, tensors

from kvgen.cache.manager import KVCache
from kvgen.cache.policies import POLICIES, find_policy
from kvgen.cache.policy import PairSlots, Policy
from kvgen.cache.quantized import Int8, Quantized
from kvgen.cache.slots import TokenSlots
from kvgen.cache.spec import FULL, HYBRID, SLIDING, LayerSpec
from kvgen.cache.state import State
from kvgen.errors import UsageError

QUANTIZED = [
    "int8",
    "int4",
    "int8,keys:channel,group:8,recent:0",
    "int4,keys:token,group:2,recent:3",
    "int4,group:4,recent:5",
]


def spec_for(window: int | None, kind: str | None = None) -> LayerSpec:
    return LayerSpec(kind or (SLIDING if window else FULL), HEADS, KEY_DIM, VALUE_DIM, window)


def real_bytes(slots: PairSlots) -> int:
    storages = {b.untyped_storage().data_ptr(): b.untyped_storage() for b in slots.buffers()}
    return sum(storage.nbytes() for storage in storages.values())


class ListLayer:
    """The oracle: every pair ever appended, in a list, cut to the window when asked."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.pairs: list[float] = []

    def update(self, new: list[float]) -> list[float]:
        readable = self.held() + new
        self.pairs += new
        return readable

    def held(self) -> list[float]:
        if self.window is None:
            return list(self.pairs)
        return self.pairs[max(0, len(self.pairs) - (self.window - 1)) :]


class SinkOracle(ListLayer):
    """The first ``sink`` and the last ``keep`` pairs."""

    def __init__(self, sink: int, keep: int) -> None:
        super().__init__(None)
        self.sink, self.keep = sink, keep

    def held(self) -> list[float]:
        rest = self.pairs[self.sink :]
        return self.pairs[: self.sink] + rest[max(0, len(rest) - self.keep) :]


def written(state: State) -> State:
    """As a file gives it back: tensors of its own with nothing between their slots."""
    tensors = {
        name: one.clone(memory_format=torch.contiguous_format)
        for name, one in state.tensors.items()
    }
    return State(tensors, dict(state.numbers))


operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from([1, 1, 1, 1, 2, 3, 7, 8, 9, 40])),
        st.tuples(st.just("trim"), st.integers(0, 12)),
        st.tuples(st.just("reset"), st.just(0)),
        st.tuples(st.just("fork"), st.just(0)),
        st.tuples(st.just("save"), st.just(0)),
    ),
    max_size=60,
)


def drive(
    policy: Policy,
    spec: LayerSpec,
    oracle: ListLayer,
    todo: list[tuple[str, int]],
    same: object,
) -> None:
    """Do everything to both; ``same`` compares pairs."""
    slots = policy.slots(spec)
    abandoned: list[tuple[PairSlots, list[float], int]] = []
    counter = 0.0
    for verb, count in todo:
        if verb == "append":
            new = [counter + i for i in range(1, count + 1)]
            counter += count
            width, offset = slots.sizes(count)
            expected = oracle.update(new)
            same(slots.update(*tensors(new)), expected)  # type: ignore[operator]
            assert width == len(expected)
            assert offset + width == len(oracle.pairs)  # the newest stands at its own position
        elif verb == "trim":
            evicted = len(oracle.held()) < len(oracle.pairs)
            allowed = not count or not (evicted or count > len(oracle.pairs))
            assert slots.can_trim(count) == allowed
            if allowed:
                slots.trim(count)
                oracle.pairs = oracle.pairs[: len(oracle.pairs) - count]
        elif verb == "reset":
            slots.reset()
            oracle.pairs = []
        elif verb == "save":
            abandoned.append((slots, list(oracle.pairs), slots.bytes_used))
            state = written(slots.state())
            assert sum(tensor.nbytes for tensor in state.tensors.values()) == slots.bytes_used
            slots = policy.slots(spec)
            slots.load(state)
        else:
            abandoned.append((slots, list(oracle.pairs), slots.bytes_used))
            slots = slots.fork()
        assert slots.length == len(oracle.pairs)
        assert slots.held == len(oracle.held())
        same(slots.views, oracle.held())  # type: ignore[operator]
        assert slots.bytes_used == policy.pair_bytes(spec, len(oracle.pairs), 4)
        assert sum(buffer.nbytes for buffer in slots.buffers()) == real_bytes(slots)
        if isinstance(slots, TokenSlots) and slots.window is not None:
            assert slots.capacity <= slots.window - 1 + slots.step
    for left, pairs, used in abandoned:
        oracle.pairs = pairs
        same(left.views, oracle.held())  # type: ignore[operator]
        assert left.bytes_used == used


def exactly(found: tuple[torch.Tensor, ...], expected: list[float]) -> None:
    assert numbers(*found) == expected


def nearly(levels: int, oracle: ListLayer) -> object:
    """Every number within half a level of its group's range, which all pairs bound; what is read
    back and quantised again rounds a second time in 16 bits.
    """

    def check(found: tuple[torch.Tensor, ...], expected: list[float]) -> None:
        if not found:
            assert expected == []
            return
        keys, values = found
        wanted = torch.tensor(expected)
        span = max(oracle.pairs, default=0) - min(oracle.pairs, default=0)
        limit = 0.51 * span / levels + 0.02 + 2e-3 * max(expected, default=0)
        for tensor, sign in ((keys, 1), (values, -1)):
            assert tensor.shape[2] == len(expected)
            off = (tensor * sign - wanted.view(1, 1, -1, 1)).abs()
            assert not off.numel() or off.max() <= limit

    return check


@settings(max_examples=150, deadline=None)
@given(
    window=st.sampled_from([None, 1, 2, 9, 17, 40]),
    name=st.sampled_from(QUANTIZED),
    todo=operations,
)
def test_quantized_layers_hold_what_a_list_holds_within_half_a_level(
    window: int | None, name: str, todo: list[tuple[str, int]]
) -> None:
    policy = find_policy(name)
    assert isinstance(policy, Quantized)
    spec, oracle = spec_for(window), ListLayer(window)
    drive(policy, spec, oracle, todo, nearly(2**policy.bits - 1, oracle))


@settings(max_examples=150, deadline=None)
@given(
    keep=st.sampled_from([1, 2, 7, 16, 300]), sink=st.sampled_from([0, 1, 4, 9]), todo=operations
)
def test_a_window_with_sinks_holds_the_first_and_the_last(
    keep: int, sink: int, todo: list[tuple[str, int]]
) -> None:
    policy = find_policy(f"window:{keep},sink:{sink}")
    spec = spec_for(None)
    drive(policy, spec, SinkOracle(sink, keep), todo, exactly)


@settings(max_examples=300, deadline=None)
@given(
    window=st.sampled_from([None, 1, 2, 3, 8, 9, 17]),
    name=st.sampled_from(["exact", "exact,tokens:50", *(f"step:{n}" for n in (1, 2, 4, 8, 256))]),
    todo=operations,
)
def test_exact_and_step_hold_what_a_list_holds(
    window: int | None, name: str, todo: list[tuple[str, int]]
) -> None:
    policy, spec = find_policy(name), spec_for(window)
    drive(policy, spec, ListLayer(window), todo, exactly)


def test_exact_allocates_what_the_final_length_needs_and_never_moves() -> None:
    cache = KVCache([spec_for(None)], policy=find_policy("exact").for_tokens(40))
    slots = cache.layers[0].pairs
    assert slots is not None
    slots.update(*tensors([1.0] * 10))
    address = slots.buffers()[0].data_ptr()
    for _ in range(30):
        slots.update(*tensors([2.0]))
    assert slots.buffers()[0].data_ptr() == address
    assert real_bytes(slots) == slots.bytes_used == 40 * HEADS * (KEY_DIM + VALUE_DIM) * 4


def test_codes_of_a_dequantised_block_are_the_same_codes() -> None:
    slots = Int8(recent=0).slots(spec_for(None))
    torch.manual_seed(0)
    slots.update(torch.randn(1, HEADS, 40, KEY_DIM), torch.randn(1, HEADS, 40, VALUE_DIM))
    before = [view.clone() for view in slots.views]
    slots.trim(10)  # 30 tokens: the block from 16 to 32 is read back
    for old, new in zip(before, slots.views, strict=True):
        assert torch.equal(old[:, :, :30], new)


def test_int4_packs_two_numbers_to_a_byte() -> None:
    # 64 numbers: 32 bytes of codes and one scale of 4; the same for keys and values.
    policy, spec = find_policy("int4,keys:token,recent:0"), LayerSpec(FULL, 1, 64, 64)
    assert policy.pair_bytes(spec, 16, 2) == 16 * 2 * (32 + 4)


def test_int8_of_smollm_is_below_56_percent_of_float16() -> None:
    # A token of a head: 128 numbers, 256 bytes in float16; as int8 128 codes and 2 scales of 4
    # bytes, 136. Of 1,000 tokens 976 are quantised and 24 are not: (976 * 136 + 24 * 256) / 256,000
    policy, spec = find_policy("int8,group:64"), LayerSpec(FULL, 3, 64, 64)
    assert policy.pair_bytes(spec, 1000, 2) == 3 * (976 * 136 + 24 * 256)
    for tokens in range(512, 3000):
        assert policy.pair_bytes(spec, tokens, 2) <= 0.56 * spec.pair_bytes(tokens, 2)


def test_windows_cut_full_attention_layers_only() -> None:
    policy = find_policy("window:10,sink:2")
    for spec, kept in ((spec_for(None), 12), (spec_for(None, HYBRID), 12), (spec_for(40), 39)):
        assert policy.pair_bytes(spec, 100, 4) == kept * HEADS * (KEY_DIM + VALUE_DIM) * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int9", "unknown cache 'int9'; kvgen has: step, exact, int8, int4, window"),
        ("int8,gruop:32", "does not know 'gruop:32'; the nearest option is group:VALUE"),
        ("int8,group:x", "group is a whole number, not 'x'"),
        ("int8,group:1", "2 numbers or more"),
        ("int8,recent:-1", "number of tokens"),
        ("int4,keys:head", "per token or per channel"),
        ("window", "window:N,sink:M"),
        ("step:0", "at least 1 slot"),
        ("exact,tokens:0", "at least 1 token"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_policy(text)


def test_every_policy_says_what_it_is_and_whether_it_changes_the_output() -> None:
    for name, policy in POLICIES.items():
        made = find_policy(name if name != "window" else "window:8")
        assert policy.description
        assert (made.note is None) == made.exact


def test_policies_are_found_without_torch() -> None:
    code = (
        "import sys; from kvgen.cache.policies import find_policy; find_policy('int8'); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
