"""The conversations: their messages, and the answers.

Each is about a page of Python's manual, which comes with Python. Every way gets the same ones, and
an engine in float32 gives the same tokens whatever runs beside a request.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TypeVar

import httpx
from tokenizers import Tokenizer

from harness.console import HarnessError
from harness.demo.models import Load
from harness.demo.servers import MODELS
from harness.serve import MODEL_NAME

T = TypeVar("T")
# What a user asks about a page, turn by turn.
QUESTIONS = ("In one sentence, what is this page about?", "Which part of it is used most often?")
_OPENING = "This is the beginning of a page of Python's manual:\n\n{passage}\n\n{question}"
# More than the roles of a chat's messages and a system prompt take, in either tokenizer.
_TEMPLATE_TOKENS = 48
_LIMIT = 600  # seconds of an answer, at a peak on a slow machine


@dataclass
class Answer:
    """One answer.

    Attributes:
        conversation, turn: which one, both counted from 1.
        prompt: token ids of the whole history, as the server tokenized it.
        tokens: token ids of the answer.
        logprobs: log-probability of each of ``tokens``.
        text: the answer.
        ended: whether the model ended it, and not the limit of its length.
    """

    conversation: int
    turn: int
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    ended: bool = False


@dataclass
class Conversation:
    """One user's side of a conversation, and its history."""

    number: int
    passage: str
    history: list[dict[str, str]] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The first line of its page."""
        return self.passage.strip().partition("\n")[0]

    def ask(self, client: httpx.Client, load: Load) -> Answer:
        """Send the user's next message, a page and a question first; return the answer.

        Raises:
            HarnessError: the server ended the answer too early.
            httpx.HTTPError: the server answered with an error, or not at all.
        """
        turn = len(self.history) // 2
        text = QUESTIONS[turn]
        if not self.history:
            text = _OPENING.format(passage=self.passage, question=text)
        self.history.append({"role": "user", "content": text})
        body = {
            "model": MODEL_NAME,
            "messages": self.history,
            "max_tokens": load.answer_tokens,
            "temperature": 0,
            "seed": 0,
            "ignore_eos": load.whole,
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
        }
        response = client.post("/v1/chat/completions", json=body, timeout=_LIMIT)
        response.raise_for_status()
        found = response.json()
        (choice,) = found["choices"]
        answer = Answer(
            self.number,
            turn + 1,
            found["prompt_token_ids"],
            choice["token_ids"],
            [one["logprob"] for one in choice["logprobs"]["content"]],
            choice["message"]["content"] or "",
            choice["finish_reason"] == "stop",
        )
        if not answer.ended and len(answer.tokens) != load.answer_tokens:
            raise HarnessError(
                f"an answer ended after {len(answer.tokens)} of {load.answer_tokens} tokens "
                f"({choice['finish_reason']})"
            )
        self.history.append({"role": "assistant", "content": answer.text})
        return answer


def passages(tokenizer: Tokenizer, tokens: int, count: int) -> list[str]:
    """Return the first ``tokens`` of the ``count`` longest pages of Python's manual."""
    longest = sorted(topics.values(), key=lambda page: (-len(page), page))[:count]
    found = []
    for page in longest:
        ends = [end for _, end in tokenizer.encode(page, add_special_tokens=False).offsets]
        found.append(page[: ends[min(tokens, len(ends)) - 1]])
    return found


def conversations(model: Path, load: Load) -> dict[str, list[Conversation]]:
    """Return the conversations of each of two models, with numbers of their own."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    pages = passages(tokenizer, load.opening, len(MODELS) * load.conversations)
    made = [Conversation(number + 1, page) for number, page in enumerate(pages)]
    return {name: made[at :: len(MODELS)] for at, name in enumerate(MODELS)}


def longest_request(model: Path, load: Load) -> int:
    """Return tokens that no request of a conversation is longer than, answer included."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    said = len(tokenizer.encode(_OPENING + "".join(QUESTIONS)).ids)
    return load.opening + said + _TEMPLATE_TOKENS + len(QUESTIONS) * load.answer_tokens


def at_once(function: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
    """Call a function for all arguments at once, each in a thread; return the results.

    After a failure or a signal it does not wait: the other calls end with their server.
    """
    pool = ThreadPoolExecutor(len(arguments[0]))
    try:
        calls = [pool.submit(function, *one) for one in zip(*arguments, strict=True)]
        for call in wait(calls, return_when=FIRST_EXCEPTION).done:
            call.result()  # raises what failed first, whichever it was
        return [call.result() for call in calls]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
