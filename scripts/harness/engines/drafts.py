"""What speculative decoding drafts, and what the model accepts of it."""

from typing import Any


class Drafts:
    """Counts, by request, the tokens that were drafted, and those of its answer that are drafts.

    What is drafted depends on the schedule: asynchronous scheduling drafts for a step that a
    request turns out not to need, and the last draft may reach beyond the last token. What is
    accepted within the answer depends on the model and on what drafts for it alone.
    """

    def __init__(self, scheduler: Any) -> None:
        self.counts: dict[str, list[int]] = {}
        update = scheduler.update_from_output

        def counted(planned: Any, output: Any) -> Any:
            for name, drafted in planned.scheduled_spec_decode_tokens.items():
                request = scheduler.requests.get(name)
                if request is None or request.is_finished():
                    continue
                sampled = output.sampled_token_ids[output.req_id_to_index[name]]
                room = request.max_tokens - request.num_output_tokens
                counts = self.counts.setdefault(self.name(name), [0, 0])
                counts[0] += len(drafted)
                counts[1] += max(0, min(len(sampled) - 1, room))
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
