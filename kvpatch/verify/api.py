"""What is asked of a server over HTTP, on 127.0.0.1."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from kvpatch.verify.child import Ended

SECONDS = 900.0  # that a server may take to send the next piece of an answer
TOP = 5  # most likely tokens that come with each token


@dataclass
class Answer:
    """One answer, greedily decoded."""

    name: str
    prompt_tokens: int = 0  # as the server counted them
    tokens: list[str] = field(default_factory=list)  # vLLM's names, which have their ids
    top: list[dict[str, float]] = field(default_factory=list)  # of each, and the most likely ones
    first: float = 0.0  # seconds from sending to its first token


class Api:
    """A server on 127.0.0.1."""

    def __init__(self, port: int, key: str = "") -> None:
        self._port = port
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self.model = ""
        self.longest = 0

    def healthy(self) -> bool:
        """Return whether it answers."""
        try:
            return self._ask("GET", "/health", seconds=5)[0] == 200
        except Ended:
            return False

    def look(self) -> None:
        """Read the name of its model, and the tokens of its longest request."""
        status, body = self._ask("GET", "/v1/models")
        if status != 200:
            raise Ended(f"the server answered {status} to /v1/models: {body[:300]}")
        first = json.loads(body)["data"][0]
        self.model, self.longest = first["id"], int(first["max_model_len"])

    def metrics(self) -> str:
        """Return its metrics, in Prometheus's text format; empty if it has none."""
        status, body = self._ask("GET", "/metrics")
        return body if status == 200 else ""

    def reset(self) -> bool:
        """Empty the device's prefix cache; return whether vLLM did: no copy is in flight."""
        status, body = self._ask("POST", "/reset_prefix_cache")
        if status != 200:
            return False
        # Older releases answer with nothing.
        return bool(json.loads(body).get("success", True)) if body.strip() else True

    def sleep(self, level: int) -> None:
        """Let the engine sleep and wake up, with the weights that level 2 dropped, or Ended."""
        self._must(f"/sleep?level={level}")
        self._must("/wake_up")
        if level == 2:
            self._must("/collective_rpc", {"method": "reload_weights"})

    def _must(self, path: str, body: Mapping[str, str] | None = None) -> None:
        status, said = self._ask("POST", path, body=body)
        if status != 200:
            raise Ended(f"the server answered {status} to {path}: {said[:300]}")

    def complete(self, name: str, prompt: str, tokens: int) -> Answer:
        """Complete a prompt greedily, with exactly ``tokens`` tokens, or raise Ended."""
        answer = Answer(name)
        sent = time.perf_counter()
        for chunk in self._stream(prompt, tokens, logprobs=TOP):
            usage = chunk.get("usage")
            if usage:
                answer.prompt_tokens = int(usage["prompt_tokens"])
            for choice in chunk.get("choices", ()):
                found = choice.get("logprobs")
                if not found or not found["tokens"]:
                    continue
                answer.first = answer.first or time.perf_counter() - sent
                answer.tokens += found["tokens"]
                pairs = zip(found["tokens"], found["token_logprobs"], strict=True)
                own = [{token: float(value)} for token, value in pairs]
                tops = found.get("top_logprobs") or [{}] * len(own)
                answer.top += [(top or {}) | one for top, one in zip(tops, own, strict=True)]
        if len(answer.tokens) != tokens:
            raise Ended(f"an answer ended after {len(answer.tokens)} of {tokens} tokens")
        return answer

    def abort(self, prompt: str, tokens: int, after: int) -> None:
        """Send a prompt, and leave after some pieces of its answer; after 0 once it is sent."""
        pieces = self._stream(prompt, tokens)
        try:
            for _ in range(after + 1):
                next(pieces, None)
        finally:
            pieces.close()

    def _stream(
        self, prompt: str, tokens: int, **more: Any
    ) -> Generator[Mapping[str, Any], None, None]:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "seed": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_tokens_as_token_ids": True,
            **more,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=SECONDS)
        with closing(connection):
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), self._headers)
                yield {}  # it is sent
                answer = connection.getresponse()
                if answer.status != 200:
                    text = answer.read().decode(errors="replace")
                    raise Ended(f"the server answered {answer.status}: {text[:300]}")
                for line in answer:
                    if line.startswith(b"data: {"):
                        chunk = json.loads(line[6:])
                        if "error" in chunk:
                            raise Ended(f"the server answered {chunk['error']}")
                        yield chunk
            except (OSError, http.client.HTTPException) as error:
                raise Ended(f"the server stopped answering ({error!r})") from error

    def _ask(
        self,
        method: str,
        path: str,
        seconds: float = SECONDS,
        body: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=seconds)
        with closing(connection):
            try:
                given = None if body is None else json.dumps(body)
                connection.request(method, path, given, self._headers)
                answer = connection.getresponse()
                return answer.status, answer.read().decode(errors="replace")
            except (OSError, http.client.HTTPException) as error:
                raise Ended(f"the server does not answer {path} ({error!r})") from error
