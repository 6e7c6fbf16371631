"""Limits that options of several commands share."""

# Every library's generator takes these.
SEEDS = {"min": 0, "max": 2**32 - 1}
