"""Settings of the property tests."""

from __future__ import annotations

from hypothesis import settings

# The same examples in every run, and no failures on a machine that is merely slow.
settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.load_profile("steady")
