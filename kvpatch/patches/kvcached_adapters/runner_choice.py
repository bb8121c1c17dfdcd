"""The model runner that vLLM chooses, where kvcached has no adapter for the new one.

From vLLM 0.22 on a GPU takes Model Runner V2 for some models, from 0.25 on for every dense one.
Setting ``VLLM_USE_V2_MODEL_RUNNER`` would decide for every model, also for those that need V2.
"""

from __future__ import annotations

import os
from typing import Any

from kvpatch.environ import VLLM_USE_V2_MODEL_RUNNER
from kvpatch.logs import log
from kvpatch.process import started_by_multiprocessing

# Runner V1 does not give them what they read (short convolutions, n-grams), or has not been
# vLLM's default for them in any release.
NEEDS_V2 = frozenset(
    {
        "InklingForCausalLM",
        "InklingForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
        "LongcatFlashNgramForCausalLM",
    }
)
_said_by = 0  # the process that logged the line; a forked child inherits this


def v1_by_default(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> bool:
    """Keep Model Runner V2 from being the default of a model that runs on V1 as well.

    vLLM asks only where the operator did not choose and the configuration does not need V2
    (diffusion, some draft models). Those stay on V2, and are refused.
    """
    if not wrapped(*args, **kwargs):
        return False
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        return True  # vLLM chooses V1 then, and says why
    if not NEEDS_V2.isdisjoint(instance.model_config.architectures or ()):
        return True
    _say()
    return False


def _say() -> None:
    global _said_by
    if _said_by == os.getpid():
        return
    _said_by = os.getpid()
    # Engine and workers choose again, by the same configuration.
    say = log.debug if started_by_multiprocessing() else log.warning
    say(
        "kvpatch: Model Runner V1 is used where vLLM would use V2 by default, because kvcached "
        "has no adapter for V2 before vLLM 0.28; set %s=0 to choose V1 yourself",
        VLLM_USE_V2_MODEL_RUNNER,
    )
