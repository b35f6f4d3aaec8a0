"""Speculative decoding: drafters, and the rules by which the target model accepts what they propose.

`speculator` runs a step with drafts, `drafter` is the interface of what proposes them: `lookup`, `mtp` and `dspark`.
"""
