"""The arguments in docs/containers, by vLLM's own parser."""

import json
import sys

import yaml

from harness import ROOT

FOLDER = ROOT / "docs/containers"
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
names = ("model", "model_tag", "port", "kv_offloading_size", "enable_sleep_mode")
read = [vars(parser.parse_args(words)) for words in json.loads(sys.argv[1])]
print(json.dumps([[one.get(name) for name in names] for one in read]))
"""


def arguments() -> list[list[str]]:
    """What vLLM is started with: by Compose, in the pod, and by AIBrix for the ModelClaim."""
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    given = [one["command"] for one in compose.values() if "command" in one]
    for document in yaml.safe_load_all((FOLDER / "two-models.yaml").read_text()):
        if document["kind"] == "Deployment":
            pod = document["spec"]["template"]["spec"]
            servers = [*pod["initContainers"], *pod["containers"]]
            given += [one["args"] for one in servers if one["command"] == ["vllm", "serve"]]
    spec = yaml.safe_load((FOLDER / "modelclaim.yaml").read_text())["spec"]
    claimed = ["--model", "Qwen/Qwen3-8B", "--port", "20000", "--enable-sleep-mode"]
    for name, value in spec["engineConfig"]["args"].items():
        claimed += [name, value] if value else [name]
    return [*given, claimed]


def test_vllm_understands_every_argument(run):
    chat, code = "Qwen/Qwen3-8B", "Qwen/Qwen2.5-Coder-7B-Instruct"
    given = arguments()
    done = run(sys.executable, "-c", PARSE, json.dumps(given), KVPATCH="0")
    assert done.code == 0, done.err
    read = json.loads(done.out.splitlines()[-1])
    models = [tag or model for model, tag, *_ in read]
    assert models == [chat, code, chat, code, chat]
    assert [port for _, _, port, *_ in read] == [8000, 8000, 8000, 8001, 20000]
    assert {size for *_, size, _ in read} == {16}
    assert not any(sleeps for *_, sleeps in read)
