"""Starts servers, one after the other, each with a folder, a device and a warm cache."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from harness.bench import loads
from harness.bench.client import serve
from harness.bench.loads import Load, Prompt
from harness.bench.sizes import BLOCK_TOKENS, Size
from harness.console import Screen
from harness.serve import Kind, Server


@dataclass
class Starter:
    """Starts servers on models.

    Attributes:
        models: the folder of each model by its name.
        folder: for everything temporary.
        size: of the run.
        screen: where progress goes.
        logs: folder for the servers' logs; None for ``folder``.
        folders: of each server, where its device's ledger is too.
    """

    models: dict[str, Path]
    folder: Path
    size: Size
    screen: Screen
    logs: Path | None = None
    folders: dict[Server, Path] = field(default_factory=dict)

    def start(
        self, stack: ExitStack, kind: Kind, model: str = "a", device: str | None = None
    ) -> Server:
        """Start a server, wait for it, and let it answer once.

        Args:
            stack: ends the server.
            kind: what it is.
            model: name of its model.
            device: servers of one name share a device; None for one of its own.

        Raises:
            HarnessError: it ended, or did not answer in time.
        """
        folder = self.folder / (device or kind.slug)
        folder.mkdir(exist_ok=True)
        self.screen.live(f"starting {kind.name}")
        server = stack.enter_context(
            kind.server(self.models[model], folder, self.logs or self.folder)
        )
        self.folders[server] = folder
        if kind.environment.get("KVPATCH") == "1" and not server.elastic:
            raise server.failure("did not report its KV cache on elastic memory")
        serve(self._warm_up(), server, folder)
        server.reset_caches()
        if server.has("worker-extension-cls"):
            server.rpc("count_copies")
        self.screen.say(f"{kind.name}: ready after {server.start_seconds:.0f} s")
        return server

    def _warm_up(self) -> Load:
        """As long and as many as the loads have: a server's first requests pay for its set-up."""
        source = loads.numbers("warm-up", 0)
        blocks = self.size.prompt // BLOCK_TOKENS
        prompts = tuple(
            Prompt(tuple(next(source) for _ in range(blocks)), 2) for _ in range(self.size.together)
        )
        return Load(prompts, self.size.together)
