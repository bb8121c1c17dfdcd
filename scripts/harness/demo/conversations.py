"""The conversations: their messages, their order, and the answers.

Everything is seeded, and one request runs at a time, so that both servers get the
same schedule and a float32 engine gives the same tokens.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx

from harness.console import HarnessError
from harness.demo.options import Load
from harness.serve import MODEL_NAME

_VOCABULARY = """
    the a of and to in page block cache layer memory token prompt engine worker copy
    store load map unmap elastic device tier region stride request answer question
    conversation returns leaves grows shrinks waits holds gives takes back again early
    late small large first last every other never always between before after while
"""


def text(rng: random.Random, size: int) -> str:
    """Return about ``size`` characters of words; the tokenizer has one token per byte."""
    vocabulary = _VOCABULARY.split()
    words: list[str] = []
    length = 0
    while length < size:
        words.append(rng.choice(vocabulary))
        length += len(words[-1]) + 1
    return " ".join(words)


@dataclass
class Answer:
    """One answer as the API streamed it.

    Attributes:
        conversation, turn: which one, both counted from 1.
        prompt: token ids of the whole history, as the server tokenized it.
        tokens: token ids of the answer.
        logprobs: log-probability of each of ``tokens``.
        ttft: seconds from sending the request to its first token.
        from_tier: prompt tokens that came from the CPU tier.
        from_cache: prompt tokens that were still in the KV cache.
    """

    conversation: int
    turn: int
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    ttft: float = 0.0
    from_tier: int = 0
    from_cache: int = 0

    @property
    def returning(self) -> bool:
        """Whether it continues a conversation, whose blocks were evicted since."""
        return self.turn > 1


class Conversation:
    """One user's side of a conversation, and its history."""

    def __init__(self, number: int, load: Load) -> None:
        self.number = number
        self._rng = random.Random(f"conversation {number}")
        step = (load.longest - load.shortest) / max(1, load.conversations - 1)
        self._opening = round(load.shortest + step * (number - 1))
        self.history: list[dict[str, str]] = []

    def say(self) -> list[dict[str, str]]:
        """Add the user's next message: a long text first, then a short question."""
        size = 200 if self.history else self._opening
        self.history.append({"role": "user", "content": text(self._rng, size)})
        return self.history

    def hear(self, answer: Answer) -> None:
        """Add the answer to the history."""
        self.history.append({"role": "assistant", "content": answer.text})


def hold(client: httpx.Client, load: Load) -> Iterator[Answer]:
    """Hold all conversations turn by turn; yield every answer as it is complete.

    A conversation returns only after all others have had their turn, when its blocks have
    been evicted from the KV cache.
    """
    conversations = [Conversation(number + 1, load) for number in range(load.conversations)]
    for turn in range(1, load.turns + 1):
        for conversation in conversations:
            answer = Answer(conversation.number, turn)
            ask(client, conversation.say(), load.answer_tokens, answer)
            conversation.hear(answer)
            yield answer


def warm_up(client: httpx.Client, load: Load) -> None:
    """Send one prompt that no conversation has: a server's first request pays for its set-up."""
    messages = [{"role": "user", "content": text(random.Random("warm-up"), load.longest)}]
    ask(client, messages, 2, Answer(0, 0))


def ask(
    client: httpx.Client, messages: list[dict[str, str]], max_tokens: int, answer: Answer
) -> None:
    """Send one chat request and fill ``answer`` while it streams in.

    Raises:
        HarnessError: the server answered with an error or stopped in the middle.
    """
    body = {
        "model": MODEL_NAME,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "seed": 0,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
        "stream": True,
    }
    sent = time.perf_counter()
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise HarnessError(f"the server answered {response.status_code}: {response.text}")
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise HarnessError(f"the server answered {chunk['error']}")
                answer.prompt = chunk.get("prompt_token_ids") or answer.prompt
                for choice in chunk["choices"]:
                    tokens = choice.get("token_ids") or []
                    if tokens and not answer.tokens:
                        answer.ttft = time.perf_counter() - sent
                    answer.tokens += tokens
                    answer.text += choice["delta"].get("content") or ""
                    if choice.get("logprobs"):
                        answer.logprobs += [
                            entry["logprob"] for entry in choice["logprobs"]["content"]
                        ]
    except httpx.HTTPError as error:
        raise HarnessError(
            f"the server stopped answering ({error or type(error).__name__})"
        ) from error
    if len(answer.tokens) != max_tokens or not answer.prompt:
        raise HarnessError(
            f"the server ended an answer after {len(answer.tokens)} of {max_tokens} tokens"
        )
