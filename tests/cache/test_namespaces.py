"""Namespaces that clients make up without end do not stay."""

import numpy as np

from headway.cache import CacheConfig, FullAttention, PrefixCache, Prompt


def test_namespaces_behind_which_nothing_is_known_are_forgotten() -> None:
    cache = PrefixCache(CacheConfig([FullAttention("attention", 8)], blocks=16, block_tokens=4, history_tokens=0))
    tokens = np.arange(40, dtype=np.int32)
    for i in range(3000):
        lease = cache.lease(Prompt(tokens, namespace=cache.namespace(salt=f"client {i}")))
        cache.commit(cache.extend([lease.row], len(tokens)))
        cache.finish([lease.row])
    # The pool holds one such prompt and no history is kept: all but the last few namespaces are empty.
    assert len(cache._index.tree.roots) < 300
    assert len(cache._namespaces) < 2000


def test_a_namespace_in_use_keeps_its_id() -> None:
    cache = PrefixCache(CacheConfig([FullAttention("attention", 8)], blocks=4096, block_tokens=4))
    tokens = np.arange(8, dtype=np.int32)
    first = cache.namespace(salt="first")
    lease = cache.lease(Prompt(tokens, namespace=first))
    cache.commit(cache.extend([lease.row], len(tokens)))
    cache.finish([lease.row])
    for i in range(5000):
        cache.namespace(salt=f"never used {i}")
    assert cache.namespace(salt="first") == first
    assert cache.lookup(Prompt(tokens, namespace=first)).tokens == 7
