"""What is known of mutants that no unit test notices: by module, then by the mutant's id."""

from __future__ import annotations

# The change cannot be seen: the reason.
EQUIVALENT: dict[str, dict[str, str]] = {}
# The change is a fault that only an engine, a GPU or another process shows: which.
ELSEWHERE: dict[str, dict[str, str]] = {}
