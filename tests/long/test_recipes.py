"""What docs/recipes.md and docs/share-a-gpu.md say to type, typed.

Every recipe as it stands but for its sizes; and a served engine for the commands beside it.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import ROOT
from harness.engines.runs import Finished, Run, prompts
from harness.engines.serving import eventually, watched
from harness.serve import Server

PAGE = (ROOT / "docs/recipes.md").read_text()
SHARED = (ROOT / "docs/share-a-gpu.md").read_text()
SIZE = 16 << 20  # of each CPU tier, 64 blocks, and not the 16 GiB of the page
BLOCKS = 20  # of the driver's prompt
# Nothing stays on the device, as the page says; and blocks have the same names after a restart.
CHECKED = (("KVCACHED_MAX_CACHED_TOKENS", "0"), ("PYTHONHASHSEED", "0"))


def command(page: str, words: str) -> str:
    """A page's command that starts with ``words``."""
    found = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = "".join(found).replace("\\\n", " ").splitlines()
    return next(line for line in lines if line.startswith(words))


def recipes() -> list[Any]:
    """Every JSON document of the page, under the heading it stands below."""
    found = []
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        heading = section.partition("\n")[0]
        bodies = re.findall(r"^```json\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        for number, body in enumerate(bodies, 1):
            found.append(pytest.param(json.loads(body), id=f"{heading} {number}"))
    return found


def here(recipe: dict[str, Any], disk: Path) -> dict[str, Any]:
    """The recipe with small tiers, in a folder of the test."""
    extra = dict(recipe["kv_connector_extra_config"])
    if "connectors" in extra:
        extra["connectors"] = [here(each, disk) for each in extra["connectors"]]
    if "cpu_bytes_to_use" in extra:
        extra["cpu_bytes_to_use"] = SIZE
    for tier in extra.get("secondary_tiers", ()):
        tier["root_dir"] = str(disk / tier["root_dir"].strip("/"))
    return recipe | {"kv_connector_extra_config": extra}


def folders(recipe: dict[str, Any]) -> list[Path]:
    """The folders of every disk tier."""
    extra = recipe["kv_connector_extra_config"]
    inside = [folder for each in extra.get("connectors", ()) for folder in folders(each)]
    return inside + [Path(tier["root_dir"]) for tier in extra.get("secondary_tiers", ())]


@pytest.mark.parametrize("recipe", recipes())
def test_a_recipe_serves_a_prompt_from_its_tier(recipe, serve, tmp_path):
    recipe = here(recipe, tmp_path / "disk")

    def ask(times: int) -> Finished:
        return serve(
            Run(environment=CHECKED),
            engine={"kv_transfer_config": recipe},
            rounds=[prompts(1)] * times,
            one_by_one=True,  # every copy has ended before the prompt comes again
        )

    def records(finished: Finished) -> list[Any]:
        finished.round(0)
        return [record for (record,) in finished.result["rounds"]]

    asked = ask(2)
    assert [one["cached"] for one in records(asked)] == [0, BLOCKS * 32]
    assert "KV on elastic memory: yes" in asked.log
    text = json.dumps(recipe)
    mode = "lazy" if "lazy_offload" in text else "eager"
    assert (f"mode={mode}, backend=cpu" in asked.log) is ("SimpleCPUOffloadConnector" in text)
    for folder in folders(recipe):
        assert len(list(folder.rglob("*.bin"))) == BLOCKS
    again = records(ask(1)) if folders(recipe) else records(asked)[-1:]
    assert [one["cached"] for one in again] == [BLOCKS * 32]
    assert len({tuple(one["tokens"]) for one in records(asked) + again}) == 1


class Typed:
    """A served engine, and the pages' commands typed beside it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.name = server.environment["KVCACHED_IPC_NAME"]

    def type(self, line: str) -> str:
        """Type a page's line in a shell, with this engine's model, address and name."""
        line = line.replace("MODEL", str(self.server.model)).replace("chat", self.name)
        done = subprocess.run(
            ["bash", "-c", line.replace("http://127.0.0.1:8000", self.server.url)],
            env=self.server.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(self) -> str:
        """Send the page's prompt; return the text that it is continued with."""
        return str(json.loads(self.type(command(PAGE, "curl ")))["choices"][0]["text"])

    def engine(self) -> dict[str, Any]:
        processes = json.loads(self.type("kvpatch status --json"))["processes"]
        (engine,) = [process["engine"] for process in processes if "engine" in process]
        return dict(engine)


@pytest.fixture(scope="module")
def served(device, tmp_path_factory):
    """SimpleCPUOffloadConnector, switched on without a JSON document."""
    own = {
        "VLLM_USE_SIMPLE_KV_OFFLOAD": "1",
        "KVCACHED_IPC_NAME": f"recipes-{os.getpid()}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    run = Run(offload=False, environment=CHECKED).within(own)
    folder = tmp_path_factory.mktemp("serve")
    with watched(run, device, folder, kv_offloading_size=0.25) as server:
        yield Typed(server)


def test_the_page_s_check_of_a_served_engine(served):
    text = served.ask()
    assert eventually(lambda: served.engine()["tier"]["used_blocks"] > 0)
    stored = served.engine()["tier"]["used_blocks"]
    assert stored == served.engine()["queries"]["device"] // 32
    assert served.ask() == text
    assert eventually(lambda: served.engine()["hits"]["tier"] == stored * 32)
    said = served.type(command(PAGE, "kvpatch status"))
    assert f"{stored * 32} came from the tier" in said
    assert "1.00 loaded for each stored" in said


def test_the_doctor_leaves_a_running_engine_s_pool_alone(served):
    pool = Path("/dev/shm") / served.name
    assert pool.exists()
    assert str(pool) not in served.type("kvpatch doctor")


def test_a_limit_is_moved_and_seen_at_the_next_request(served):
    assert served.name in served.type(command(SHARED, "kvctl list"))
    before = served.engine()["device"]
    # Half of what it has: a limit above what an engine started with is cut to that.
    half = before["total_pages"] // 2 * before["page_bytes"]
    line = command(SHARED, "kvctl limit").replace("8G", f"{half >> 20}M")
    assert f"limit for {served.name} to {half >> 20}.00 MB" in served.type(line)
    assert served.engine()["device"]["total_pages"] == before["total_pages"]
    served.ask()

    def limit() -> int:
        device = served.engine()["device"]
        return int(device["total_pages"] * device["page_bytes"])

    assert eventually(lambda: limit() == half)


PARSE = """
import json, sys
from pathlib import Path
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

lines = json.loads(Path(sys.argv[1]).read_text())
for line in lines:
    given = ["{}" if word.startswith("$(cat ") else word for word in line[1:]]
    make_arg_parser(FlexibleArgumentParser()).parse_args(given)
print("understood", len(lines))
"""


def test_vllm_knows_every_option_of_every_documented_command(tmp_path):
    """By the parser of ``vllm serve`` itself, in a process with kvpatch off."""
    lines = []
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text().replace("\\\n", " ")  # a line that goes on
        found = re.findall(r"^(?: {4})?([A-Z_0-9a-z=./]+ )*vllm (serve .*)$", text, re.M)
        lines += [shlex.split(line) for _, line in found]
    assert len(lines) >= 10
    (tmp_path / "lines.json").write_text(json.dumps(lines))
    done = subprocess.run(
        [sys.executable, "-c", PARSE, tmp_path / "lines.json"],
        env=os.environ | {"KVPATCH": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"understood {len(lines)}" in done.stdout
