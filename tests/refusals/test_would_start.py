"""``kvpatch doctor -- vllm serve``: what a start would say, without one."""

import json
import sys

import pytest

from harness.engines.refused import SMALL

TIERS = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 28}


@pytest.fixture
def examine(run, machine, model):
    """Return what doctor finds about a command on the small model, and its exit code."""

    def examine(*flags: str, command: tuple[str, ...] = ("vllm", "serve"), **changes: str):
        doctor = (sys.executable, "-m", "kvpatch", "doctor", "--json", "--", *command)
        done = run(*doctor, model, *SMALL, *flags, **machine | changes)
        report = json.loads(done.out)
        return [one for one in report["findings"] if one["topic"] == "command"], done.code

    return examine


def problems(findings):
    return [one for one in findings if one["level"] == "problem"]


def test_a_command_that_would_start(examine, model):
    (said,), code = examine(*("--kv-offloading-size", "1"))
    assert (said["level"], code) == ("ok", 0)
    assert said["what"] == (
        f"{model} in float32, requests of up to 2048 tokens, KV cache in auto, "
        "OffloadingConnector, a CPU tier of 1.0 GiB"
    )


def test_it_says_what_the_start_says(examine, start_server):
    """Refusals of a configuration, word for word."""
    extra = TIERS | {"secondary_tiers": [{"type": "example"}]}
    connector = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    flags = ("--kv-transfer-config", json.dumps({"kv_role": "kv_both"} | connector))
    said, code = examine(*flags)
    refused = start_server(connector=connector)
    (problem,) = problems(said)
    assert (problem["what"].partition(" [")[0], problem["code"], code) == (
        refused.sentence,
        refused.code,
        1,
    )
    assert refused.code == "KVP321"


def test_keys_that_vllm_ignores_are_a_warning(examine):
    tiers = [{"type": "fs", "root_dir": "/tmp"}]
    extra = {"cpu_bytes_to_use": 1 << 28, "eviction_polic": "arc", "secondary_tiers": tiers}
    connector = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    flags = ("--kv-transfer-config", json.dumps({"kv_role": "kv_both"} | connector))
    found, code = examine(*flags)
    assert ([one["level"] for one in found], code) == (["ok", "warning"], 0)
    of = "OffloadingConnector's kv_connector_extra_config"
    ignores, beside = found[1]["what"].split(", and ")
    assert ignores.endswith(f"ignores eviction_polic of {of}: did you mean eviction_policy?")
    assert beside.endswith(
        f"ignores secondary_tiers of {of}: it takes spec_name TieringOffloadingSpec beside it"
    )


def test_a_first_limit_that_no_request_of_the_longest_length_fits(examine):
    """Doctor's figure is the model's shape; the engine's own is of the pages that it has."""
    found, code = examine("--kv-offloading-size", "1", KVPATCH_FIRST_LIMIT="8MiB")
    (problem,) = problems(found)
    assert (problem["code"], code) == ("KVP424", 1)
    assert problem["what"].startswith(
        "KVPATCH_FIRST_LIMIT is 8MiB, and a request of 2048 tokens needs 16 MiB: it would wait"
    )


def test_every_bad_value_at_once(examine):
    """Of options, of the configuration, of variables and of disks."""
    tiers = TIERS | {"secondary_tiers": [{"type": "p2p"}, {"type": "fs", "root_dir": "/proc/kv"}]}
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    flags = (
        *("--kv-ofloading-size", "1", "--max-num-seqs", "many"),
        *("--kv_transfer_config", json.dumps(connector | {"kv_connector_extra_config": tiers})),
    )
    found, code = examine(*flags, command=("env", "KVPATCH_IDLE=soon", "vllm", "serve"))
    said = [(one["code"], one["what"].partition(":")[0], one["remedy"]) for one in problems(found)]
    assert said == [
        ("", "argument --max-num-seqs", ""),
        ("", "vLLM has no option --kv-ofloading-size", "did you mean --kv-offloading-size?"),
        ("KVP364", "kvpatch refuses to start vLLM", ""),
        (
            "KVP334",
            "the folder /proc/kv of a secondary tier cannot be used",
            "give root_dir a folder that this user can write to",
        ),
    ]
    assert code == 1


def test_a_command_of_another_program(examine):
    (said,), code = examine(command=("sglang", "serve"))
    assert "it is not vllm serve" in said["what"]
    assert code == 1
