"""What the engine is asked to do: refused by the process the operator started."""

import json

from harness.engines.refused import REFUSES
from kvpatch import patches, rules

OFFLOAD = {"kv_connector": "OffloadingConnector"}


def of_rule(code, what):
    """The sentence of a rule, without its code, for what it names."""
    every = rules.of(feature.rules for feature in patches.FEATURES)
    (rule,) = [one for one in every if one.code == code]
    return f"{REFUSES}{what}, because {rule.why}; {rule.remedy}, or set KVPATCH=0."


def test_another_connector(start_server):
    refused = start_server(connector={"kv_connector": "ExampleConnector"})
    assert refused.sentence == of_rule("KVP302", "the KV connector ExampleConnector is configured")
    assert "Traceback" not in refused.log


def test_the_disk_backend_of_the_simple_connector(start_server):
    """Switched on by a flag and a variable, which leave its own options to a document."""
    extra = {"kv_offload_backend": "disk", "disk_path": "/tmp/never-made"}
    refused = start_server(
        *("--kv-offloading-size", "1"),
        connector={"kv_connector_extra_config": extra},
        VLLM_USE_SIMPLE_KV_OFFLOAD="1",
    )
    assert refused.sentence == of_rule("KVP315", "the kv_offload_backend disk is configured")
    assert "Traceback" not in refused.log


TIERS = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 28}


def test_prefix_caching_off(start_server):
    """With SimpleCPUOffloadConnector, which vLLM switches off then."""
    refused = start_server(
        *("--kv-offloading-size", "1", "--no-enable-prefix-caching"),
        VLLM_USE_SIMPLE_KV_OFFLOAD="1",
    )
    what = "SimpleCPUOffloadConnector is configured with the prefix cache disabled"
    assert refused.sentence == of_rule("KVP392", what)


def inside(*connectors):
    return {"connectors": [{"kv_role": "kv_both"} | connector for connector in connectors]}


SWEEP = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from kvpatch.refusal import Refusal
model, cases = sys.argv[1], json.loads(sys.argv[2])
answers = {}
for name, (arguments, extra) in cases.items():
    multi = "connectors" in extra
    transfer = {"kv_connector": "MultiConnector" if multi else "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28} | extra}
    try:
        EngineArgs(model, max_model_len=2048, block_size=32, kv_transfer_config=transfer,
                   **arguments).create_engine_config()
        answers[name] = "accepted"
    except Refusal as refusal:
        answers[name] = str(refusal)
    except Exception as error:
        answers[name] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(answers))
raise SystemExit(3)
"""


# What the config.json of a checkpoint with an fp8 KV cache has, by llm-compressor and ModelOpt.
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {},
    "ignore": [],
    "kv_cache_scheme": {
        "num_bits": 8,
        "type": "float",
        "dynamic": False,
        "symmetric": True,
        "strategy": "tensor",
    },
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}


def checkpoint(quantization, **arguments):
    return {"hf_overrides": {"quantization_config": quantization}} | arguments, {}


def test_the_other_rules_on_configurations_of_vllm_itself(start_python, model):
    """One process builds every configuration with vLLM's code, up to the refusal."""
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    cases = {
        "plain": ({}, {}),
        "canonical": ({}, {"canonical_layout": True}),
        "pipeline": (
            {"pipeline_parallel_size": 2},
            TIERS | {"secondary_tiers": [{"type": "fs", "root_dir": "/nowhere"}]},
        ),
        "engines": ({"data_parallel_size": 3}, {}),
        "speculative": ({"speculative_config": ngram, "kv_cache_dtype": "fp8"}, {}),
        "scheduler": ({"scheduler_cls": "somebodys.Scheduler"}, {}),
        "vLLM's scheduler": (
            {"scheduler_cls": "vllm.v1.core.sched.async_scheduler.AsyncScheduler"},
            {},
        ),
        "cache dtype": ({"kv_cache_dtype": "fp8_per_token_head"}, {}),
        "fp8": ({"kv_cache_dtype": "fp8"}, {}),
        "scheme": checkpoint(SCHEME),
        "scheme in bfloat16": checkpoint(SCHEME, kv_cache_dtype="bfloat16"),
        "ModelOpt": checkpoint(MODELOPT),
        "ModelOpt in bfloat16": checkpoint(MODELOPT, kv_cache_dtype="bfloat16"),
        "too large": ({}, {"cpu_bytes_to_use": 1 << 50}),
        "external executor": ({"distributed_executor_backend": "external_launcher"}, {}),
        "fs": ({}, TIERS | {"secondary_tiers": [{"type": "fs", "root_dir": "/nowhere"}]}),
        "obj": ({}, TIERS | {"secondary_tiers": [{"type": "obj"}]}),
        "p2p": ({}, TIERS | {"secondary_tiers": [{"type": "p2p"}]}),
        "multi": ({}, inside(OFFLOAD)),
        "multi with another": ({}, inside(OFFLOAD, {"kv_connector": "NixlConnector"})),
        "multi with two": ({}, inside(OFFLOAD, OFFLOAD)),
        "multi with example": (
            {},
            inside(
                OFFLOAD
                | {"kv_connector_extra_config": TIERS | {"secondary_tiers": [{"type": "example"}]}}
            ),
        ),
    }
    log = start_python(SWEEP, model, json.dumps(cases)).log
    (line,) = [line for line in log.splitlines() if line.startswith('{"plain"')]
    answers = json.loads(line)
    for accepted in (
        *("plain", "fs", "obj", "multi", "vLLM's scheduler"),
        *("fp8", "scheme", "scheme in bfloat16", "ModelOpt", "ModelOpt in bfloat16"),
    ):
        assert answers.pop(accepted) == "accepted"
    too_large = "the CPU tier takes 1048576.0 GiB and /dev/shm has "
    assert answers.pop("too large").startswith(REFUSES + too_large)
    said = {
        "canonical": "canonical_layout is set in kv_connector_extra_config",
        "pipeline": "a KV connector is configured with parallelism other than tensor parallelism",
        "engines": "data parallelism over 3 engines is configured",
        "speculative": "an fp8 KV cache and speculative decoding by ngram are configured together",
        "scheduler": "a KV connector is configured with the scheduler somebodys.Scheduler",
        "cache dtype": "a KV connector is configured with the KV cache dtype fp8_per_token_head",
        "external executor": "a KV connector is configured with the executor external_launcher",
        "p2p": "the secondary tier p2p is configured",
        "multi with another": "the KV connector NixlConnector is configured",
        "multi with two": "a MultiConnector is configured with OffloadingConnector twice",
        "multi with example": "the secondary tier example is configured",
    }
    assert {name: answer.split(", because")[0] for name, answer in answers.items()} == {
        name: REFUSES + what for name, what in said.items()
    }
