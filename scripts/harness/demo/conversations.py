"""The conversations: their messages, and the answers.

Each is about a page of Python's manual, which comes with Python. Both ways get the same ones, and
an engine in float32 gives the same tokens whatever runs beside a request.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TypeVar

import httpx
from tokenizers import Tokenizer

from harness.console import HarnessError
from harness.demo.options import Load
from harness.demo.servers import MODELS
from harness.serve import MODEL_NAME

T = TypeVar("T")
# What a user asks about a page, turn by turn.
QUESTIONS = ("In one sentence, what is this page about?", "Which part of it is used most often?")
_OPENING = "This is the beginning of a page of Python's manual:\n\n{passage}\n\n{question}"
# More than the roles of a chat's messages and a system prompt take, in either tokenizer.
_TEMPLATE_TOKENS = 48
# Of requests that arrive at once.
_APART_SECONDS = 0.02


@dataclass
class Answer:
    """One answer as the API streamed it.

    Attributes:
        conversation, turn: which one, both counted from 1.
        prompt: token ids of the whole history, as the server tokenized it.
        tokens: token ids of the answer.
        logprobs: log-probability of each of ``tokens``.
        text: the answer.
        ended: whether the model ended it, and not the limit of its length.
        ttft: seconds from sending the request to its first token.
    """

    conversation: int
    turn: int
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    ended: bool = False
    ttft: float = 0.0

    @property
    def returning(self) -> bool:
        """Whether it continues a conversation, after another model's peak."""
        return self.turn > 1


class Conversation:
    """One user's side of a conversation, and its history."""

    def __init__(self, number: int, passage: str) -> None:
        self.number = number
        self.passage = passage
        self.history: list[dict[str, str]] = []

    @property
    def turn(self) -> int:
        """Which turn it is in, counted from 1; 0 before the first."""
        return (len(self.history) + 1) // 2

    def say(self) -> list[dict[str, str]]:
        """Add the user's next message: a page and a question first, then a question."""
        text = QUESTIONS[self.turn]
        if not self.history:
            text = _OPENING.format(passage=self.passage, question=text)
        self.history.append({"role": "user", "content": text})
        return self.history

    def hear(self, answer: Answer) -> None:
        """Add the answer to the history."""
        self.history.append({"role": "assistant", "content": answer.text})


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


def hold(client: httpx.Client, conversations: Sequence[Conversation], load: Load) -> list[Answer]:
    """Hold the next turn of conversations, all at once; return every answer.

    They arrive in the same order in every turn: what a full KV cache still has depends on it.

    Raises:
        HarnessError: the server answered with an error or stopped in the middle.
    """

    def one(at: int, conversation: Conversation) -> Answer:
        time.sleep(at * _APART_SECONDS)
        messages = conversation.say()
        answer = Answer(conversation.number, conversation.turn)
        ask(client, messages, load.answer_tokens, answer, whole=load.whole)
        conversation.hear(answer)
        return answer

    return at_once(one, range(len(conversations)), conversations)


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


def warm_up(client: httpx.Client, conversation: Conversation) -> None:
    """Send a prompt that no conversation has: a server's first request pays for its set-up."""
    # Backwards, a text has more than twice the tokens.
    backwards = conversation.passage[len(conversation.passage) // 4 :: -1]
    ask(client, Conversation(0, backwards).say(), 2, Answer(0, 0))


def ask(
    client: httpx.Client,
    messages: list[dict[str, str]],
    max_tokens: int,
    answer: Answer,
    whole: bool = False,
) -> None:
    """Send one chat request and fill ``answer`` while it streams in.

    Args:
        client: of the server.
        messages: of the conversation.
        max_tokens: of the answer.
        answer: is filled.
        whole: the answer has ``max_tokens``, whatever its model would end it with.

    Raises:
        HarnessError: the server answered with an error or stopped in the middle.
    """
    body = {
        "model": MODEL_NAME,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "seed": 0,
        "ignore_eos": whole,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
        "stream": True,
    }
    reason = None
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
                    reason = choice["finish_reason"] or reason
                    if choice.get("logprobs"):
                        answer.logprobs += [
                            entry["logprob"] for entry in choice["logprobs"]["content"]
                        ]
    except httpx.HTTPError as error:
        raise HarnessError(
            f"the server stopped answering ({error or type(error).__name__})"
        ) from error
    answer.ended = reason == "stop"
    if not answer.prompt or not (answer.ended or len(answer.tokens) == max_tokens):
        raise HarnessError(
            f"the server ended an answer after {len(answer.tokens)} of {max_tokens} tokens "
            f"({reason or 'without a reason'})"
        )
