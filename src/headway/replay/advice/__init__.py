"""From a trace and a model to what to set: the few runs that matter, and a short text about them."""

from headway.replay.advice.study import Question, Study, Variant, study
from headway.replay.advice.text import advice_text

__all__ = ["Question", "Study", "Variant", "advice_text", "study"]
