"""One request's way through the cache, position by position: who was there before, what was kept, what was lost."""

from headway.replay.explain.story import Mark, Story, Stretch, tell

__all__ = ["Mark", "Story", "Stretch", "tell"]
