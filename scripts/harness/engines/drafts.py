"""What speculative decoding drafts, and what the model accepts of it."""

from __future__ import annotations

from typing import Any


class Drafts:
    """Counts, by request, the tokens that were drafted, and those that the model accepted."""

    def __init__(self, scheduler: Any) -> None:
        self.counts: dict[str, list[int]] = {}
        update = scheduler.update_from_output

        def counted(planned: Any, output: Any) -> Any:
            for request, drafted in planned.scheduled_spec_decode_tokens.items():
                sampled = output.sampled_token_ids[output.req_id_to_index[request]]
                counts = self.counts.setdefault(self.name(request), [0, 0])
                counts[0] += len(drafted)
                counts[1] += max(0, len(sampled) - 1)
            return update(planned, output)

        scheduler.update_from_output = counted

    @property
    def total(self) -> list[int]:
        """How many tokens were drafted, and accepted, of requests that were not asked for."""
        return [sum(counts[which] for counts in self.counts.values()) for which in (0, 1)]

    @staticmethod
    def name(request: str) -> str:
        """The name that ``run_round`` gave a request; vLLM puts more behind it."""
        return "-".join(request.split("-")[:2])

    def pop(self, request: str) -> list[int]:
        """How many tokens of a request that ended were drafted, and accepted."""
        return self.counts.pop(self.name(request), [0, 0])
