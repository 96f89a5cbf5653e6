import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.kv.block_hash import HASH_BYTES, BlockHasher
from pagewire.shared.kv.model_identity import ModelIdentity
from pagewire.shared.request.sampling import RequestSpec
from pagewire.tests.support.kv_layouts import model_identity

OTHERS = {
    "fingerprint": "model2",
    "weight_version": 1,
    "dtype": "float16",
    "kv_format": "float16",
    "batch_invariant": True,
    "ranks": 2,
}
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=60)


def hasher(cluster: str = "secret", **changes: Any) -> BlockHasher:
    return BlockHasher(cluster, msgspec.structs.replace(model_identity(), **changes))


def test_same_content_same_hash_in_every_process() -> None:
    # Fixed values: a change would silently void the index of a running cluster.
    hashes = hasher().hash_prompt(range(9))
    assert [h.hex() for h in hashes] == [
        "44e30e363b867ad29821f37cad8b21fd",
        "f439dea4a58200548fc8fb3efbb8e384",
    ]
    assert all(len(h) == HASH_BYTES for h in hashes)


@given(
    tokens=TOKENS,
    cuts=st.lists(st.integers(0, 60), max_size=5),
    block_size=st.integers(1, 17),
    extra=st.binary(max_size=8),
)
def test_extending_step_by_step_equals_hashing_at_once(
    tokens: list[int], cuts: list[int], block_size: int, extra: bytes
) -> None:
    blocks, hashes = hasher(block_size=block_size), []
    ends = [*sorted(cuts), len(tokens)]
    added = sum(blocks.extend(hashes, tokens[:end], extra) for end in ends)
    assert hashes == blocks.hash_prompt(tokens, extra)
    assert added == len(tokens) // block_size


@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=40), data=st.data())
def test_one_changed_token_changes_its_block_and_all_after(
    tokens: list[int], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    changed = list(tokens)
    changed[at] ^= 1 << data.draw(st.integers(0, 31))
    before, after = hasher().hash_prompt(tokens), hasher().hash_prompt(changed)
    block = at // 4
    assert before[:block] == after[:block]
    assert not set(before[block:]) & set(after[block:])


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"cluster": "secre"}, id="secret"),
        *(pytest.param({name: value}, id=name) for name, value in OTHERS.items()),
        pytest.param({"cluster": "secretm", "fingerprint": "odel"}, id="shifted-boundary"),
    ],
)
def test_workers_that_disagree_share_no_hash(other: dict[str, Any]) -> None:
    assert not set(hasher().hash_prompt(range(32))) & set(hasher(**other).hash_prompt(range(32)))


def test_every_field_of_a_models_identity_is_tried() -> None:
    assert {*OTHERS, "block_size"} == set(ModelIdentity.__struct_fields__)


def test_block_size_extra_and_parent_matter() -> None:
    blocks = hasher()
    plain = blocks.hash_prompt(range(4))
    assert plain != blocks.hash_prompt(range(4), b"adapter")
    first, second = blocks.hash_prompt([*range(4), *range(4)])
    assert [first] == plain != [second]
    assert hasher(block_size=8).hash_prompt(range(8)) != hasher().hash_prompt(range(8))[1:]


SALTS = [None, "c", "bc", "abc", "a", "\u00ff", "\u00ffa\u00ff", "\xff", "\udcff", "\0"]
TENANTS = [None, "a", "ab", "abc", "b", "c"]


def test_no_two_tenants_and_salts_have_the_same_hashes() -> None:
    pairs = [(tenant, salt) for tenant in TENANTS for salt in dict.fromkeys(SALTS)]
    extras = [
        RequestSpec(tenant=tenant, cache_salt=salt, owner=tenant).hash_extra
        for tenant, salt in pairs
    ]
    hashes = [hasher().hash_prompt(range(4), extra)[0] for extra in extras]
    assert len(set(hashes)) == len(pairs)


def test_without_a_tenant_hashes_are_those_of_the_salt_alone() -> None:
    extras = [RequestSpec(cache_salt=salt, owner="10.0.0.1").hash_extra for salt in (None, "bc")]
    assert extras == [b"", b"bc"]


@pytest.mark.parametrize("tokens", [[], [1, 2, 3]], ids=["empty", "partial"])
def test_a_block_that_is_not_full_has_no_hash(tokens: list[int]) -> None:
    assert hasher().hash_prompt(tokens) == []


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_ids_out_of_range_are_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        hasher().hash_prompt([token] * 4)


def test_eight_thousand_tokens_hash_in_milliseconds() -> None:
    blocks, tokens = hasher(block_size=16), list(range(8192))

    def once() -> float:
        start = time.perf_counter()
        blocks.hash_prompt(tokens)
        return time.perf_counter() - start

    assert min(once() for _ in range(20)) < 0.005  # 0.35 ms on an idle core
