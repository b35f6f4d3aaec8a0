"""Presets: what other engines would do with the same trace, model and memory.

Each imitates the rules of one engine, written at the head of its module with their source and with what is not
modelled. `marconi` is a policy on the cache as it is. `vllm` and `sglang` find prefixes in ways that no policy of a
tree could imitate (pages found by hash; states in slots of their own), so they are small models of their own. What can
be set of each stands in `headway.replay.config.presets`.
"""

__all__: list[str] = []
