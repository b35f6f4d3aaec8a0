"""Speculative decoding: drafters, and the rules by which the target model accepts what they propose.

`speculator` runs a step with drafts, `drafter` is the interface of what proposes them: `lookup`, `mtp` and `dspark`.
"""

from headway.runtime.drafting.acceptance import AcceptanceRule
from headway.runtime.drafting.drafter import Drafter, DraftRequest, Observed, Proposal
from headway.runtime.drafting.loading import DrafterConfig, load_drafter, save_drafter
from headway.runtime.drafting.speculator import Speculator

__all__ = [
    "AcceptanceRule",
    "DraftRequest",
    "Drafter",
    "DrafterConfig",
    "Observed",
    "Proposal",
    "Speculator",
    "load_drafter",
    "save_drafter",
]
