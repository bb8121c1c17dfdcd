"""What the refusals have in common."""

from __future__ import annotations

import re
from typing import Any

from kvpatch.refusal import VERIFIABLE, VERIFY_IT

REFUSES = "kvpatch refuses to start vLLM: "
CLI = "import sys; from vllm.entrypoints.cli.main import main; sys.exit(main())"


class Refused:
    """How a start ended that had to be refused.

    Attributes:
        sentence: the refusal, as the last line on stderr, without vLLM's process prefix and
            without its code, and how to verify it.
        code: the code at its end.
        log: everything that was printed.
    """

    def __init__(self, done: Any) -> None:
        assert done.code != 0, done.out + done.err
        said = re.sub(r"^\(\w+ pid=\d+\) ", "", done.last_line)
        sentence, _, code = said.partition(" [KVP")
        self.code = f"KVP{code.rstrip(']')}" if code else None
        assert (VERIFY_IT in sentence) is (self.code in VERIFIABLE)
        self.sentence = sentence.replace(VERIFY_IT, "")
        self.log = done.out + done.err
