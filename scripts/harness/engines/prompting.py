"""What vLLM is asked for a prompt of a job, and what is kept of its answer and its engine."""

import random
from typing import Any

import torch
from vllm import PoolingParams, PoolingRequestOutput, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from harness.hearing import RATE, SAMPLES
from harness.models import IMAGE


def image(seed: int) -> Any:
    """A seeded image, all noise."""
    from PIL import Image

    pixels = random.Random(seed).randbytes(IMAGE * IMAGE * 3)
    return Image.frombytes("RGB", (IMAGE, IMAGE), pixels)


def sound(seed: int) -> tuple[Any, int]:
    """A seeded sound, all noise, and its samples of a second."""
    return torch.randn(SAMPLES, generator=torch.Generator().manual_seed(seed)).numpy(), RATE


def prompt_of(model: Any, prompt: dict[str, Any]) -> dict[str, Any]:
    """What vLLM is given: tokens, behind a seeded image or sound or with a salt, or embeddings.

    Args:
        model: vLLM's configuration of it.
        prompt: of a job.
    """
    if "embeds" in prompt:
        source = torch.Generator().manual_seed(prompt["embeds"])
        sizes = len(prompt["tokens"]), model.get_hidden_size()
        return {"prompt_embeds": torch.randn(*sizes, generator=source).to(model.dtype)}
    given = {"prompt_token_ids": prompt["tokens"]}
    if "image" in prompt:  # its own tokens are put before these
        return given | {"multi_modal_data": {"image": image(prompt["image"])}}
    if "sound" in prompt:  # its own tokens are put in the place of the first
        return given | {"multi_modal_data": {"audio": sound(prompt["sound"])}}
    return given | ({"cache_salt": prompt["salt"]} if "salt" in prompt else {})


def greedy(tokens: int, **more: Any) -> SamplingParams:
    """What vLLM is told of an answer of so many tokens that depends on nothing but its prompt."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def params_of(model: Any, prompt: dict[str, Any]) -> SamplingParams | PoolingParams:
    """What vLLM is told of an answer: of a pooling model one pooled state, of others tokens."""
    if model.runner_type == "pooling":
        return PoolingParams(task="embed")
    pattern = prompt.get("pattern")  # that the answer must match
    return greedy(
        prompt["max_tokens"],
        logprobs=1,
        prompt_logprobs=prompt.get("prompt_logprobs"),
        structured_outputs=StructuredOutputsParams(regex=pattern) if pattern else None,
    )


def answer_of(output: Any) -> dict[str, Any]:
    """Return the tokens and log-probabilities of an answer; of a pooled state its numbers alone."""
    known = {"cached": output.num_cached_tokens}
    if isinstance(output, PoolingRequestOutput):
        return {"tokens": [], "logprobs": output.outputs.data.tolist(), "prompt": []} | known
    completion = output.outputs[0]
    # A request that fails has neither.
    steps = zip(completion.token_ids, completion.logprobs or (), strict=True)
    return known | {
        "tokens": list(completion.token_ids),
        "logprobs": [step[token].logprob for token, step in steps],
        "prompt": of_prompt(output),
    }


def of_prompt(output: Any) -> list[float]:
    """Return the log-probabilities of a prompt's tokens but the first; none if not asked for."""
    scored = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
    return [step[token].logprob for token, step in scored if step is not None]


def runner_of(config: Any) -> str:
    """Return the runner of an engine, by its ``VllmConfig``."""
    return "v2" if getattr(config, "use_v2_model_runner", False) else "v1"
