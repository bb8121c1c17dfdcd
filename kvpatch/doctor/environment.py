"""The environment variables: which are set, and which conflict."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from kvpatch import environ, gate
from kvpatch.doctor.finding import Finding, Topic
from kvpatch.doctor.packages import refused
from kvpatch.environ import KVCACHED, OURS, SWITCH
from kvpatch.versions import installed

TOPIC = Topic("environment")
COMBINATIONS = Topic("known combinations")
# Variables whose values are shown: all others of these packages may be secrets.
SHOWN = (
    *(one.name for one in (*OURS, *KVCACHED)),
    environ.VLLM_KV_CACHE_LAYOUT.name,
    environ.VLLM_USE_V2_MODEL_RUNNER.name,
    "CUDA_VISIBLE_DEVICES",
    "LD_PRELOAD",
    "PROMETHEUS_MULTIPROC_DIR",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TRITON_INTERPRET",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_LOGGING_LEVEL",
    "VLLM_PLUGINS",
    "VLLM_PORT",
    "VLLM_WORKER_MULTIPROC_METHOD",
)
NAMED = ("KVPATCH", "KVCACHED_", "VLLM_")
# What kvcached 0.1.6 reads, beside its settings.
READ = {one.name for one in KVCACHED} | {
    *("KVCACHED_LOG_COLOR", "KVCACHED_LOG_COLOR_CODE", "KVCACHED_MEMORY_POOL"),
    *("KVCACHED_PP_SIZE", "KVCACHED_SANITY_CHECK"),
}


def check(settings: Mapping[str, str]) -> list[Finding]:
    """Report what is set, and every invalid or conflicting value."""
    found = [shown(settings)]
    on = {} if settings.get(SWITCH.name) else {SWITCH.name: "1"}
    if SWITCH.is_on(settings) or SWITCH.is_off(settings):
        found.append(switch(settings))
    refusals = gate.environment_refusals(dict(settings) | on)
    found.extend(refused(TOPIC, refusal) for refusal in refusals)
    for name, meant in environ.unknown(settings):
        what = f"{name} is set, and kvpatch has no such variable"
        remedy = f"set {meant} instead" if meant else "correct its spelling"
        found.append(TOPIC.warning(what, f"{remedy}, or unset it"))
    for name in sorted(name for name in settings if name.startswith("KVCACHED_")):
        if name not in READ:
            what = f"{name} is set, and kvcached has no such variable"
            found.append(TOPIC.warning(what, "correct its spelling, or unset it"))
    found.extend(ignored(settings))
    for setting in KVCACHED:
        if setting.parse is None and not settings.get(setting.name, "unset").strip():
            what = f"{setting} is set to nothing, which kvcached may not read as unset"
            found.append(TOPIC.warning(what, f"unset {setting}"))
    return [*found, *known_combinations(settings)]


def ignored(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Yield values that are read as another one, or as none, without a word."""
    if environ.LOG.read(settings).lower() not in ("", "debug"):
        yield TOPIC.warning(f"{environ.LOG} is not debug, and of no effect", "set it to debug")
    contiguous = environ.KVCACHED_CONTIGUOUS.read(settings).lower()
    if contiguous not in ("", "true", "false"):
        what = f"{environ.KVCACHED_CONTIGUOUS}={contiguous} is read as false"
        yield TOPIC.warning(what, "set it to true or false, or unset it")
    named, here = environ.ALLOW_VLLM.read(settings), installed("vllm")
    if named and here and not gate.allowed_by_name(here[0], settings):
        what = f"{environ.ALLOW_VLLM}={named} is not the installed vLLM, {here[0].text}"
        yield TOPIC.warning(what, "name the version that is installed, or unset it")
    folder = environ.STATUS_DIR.read(settings)
    if folder and not os.access(folder, os.W_OK | os.X_OK):
        what = f"{environ.STATUS_DIR}={folder} cannot be written to: no process shows its status"
        yield TOPIC.warning(what, "make that folder, or unset it")


def known_combinations(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the settings that are known to conflict."""

    def number(variable: environ.Variable, unset: float) -> float:
        try:
            return float(variable.read(settings) or unset)
        except ValueError:
            return unset

    least = number(environ.KVCACHED_MIN_RESERVED_PAGES, 5)
    if least > number(environ.KVCACHED_MAX_RESERVED_PAGES, 10):
        yield COMBINATIONS.warning(
            "KVCACHED_MIN_RESERVED_PAGES is above KVCACHED_MAX_RESERVED_PAGES (5 and 10 when "
            "unset)",
            "set both, the smaller first",
        )
    if settings.get(environ.KVCACHED_IPC_NAME.name):
        yield COMBINATIONS.note(
            "KVCACHED_IPC_NAME is set: a second engine of this name is refused (KVP413, KVP414)",
            "give every engine a name of its own",
        )
    # Spelled as vLLM looks for it.
    if "expandable_segments:True" in settings.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        yield COMBINATIONS.warning(
            "torch's expandable segments are on, and vLLM on a GPU refuses them together with a KV "
            "connector",
            "take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF",
        )
    if "kvpatch" not in settings.get("VLLM_PLUGINS", "kvpatch").split(","):
        yield COMBINATIONS.note(
            "VLLM_PLUGINS leaves out kvpatch: a startup file that did not run would go unnoticed",
            "add kvpatch to VLLM_PLUGINS, or unset it",
        )
    if settings.get("PROMETHEUS_MULTIPROC_DIR"):
        yield COMBINATIONS.note(
            "PROMETHEUS_MULTIPROC_DIR is set: counters of earlier runs in it are added to this "
            "run's",
            "empty that folder between runs, or unset it and let vLLM make one",
        )


def shown(settings: Mapping[str, str]) -> Finding:
    """Return every relevant variable, with its value if it is none of those that may be secret."""
    pairs = [
        f"{name}={settings[name] if name in SHOWN else '(hidden)'}"
        for name in sorted(settings)
        if name in SHOWN or name.startswith(NAMED)
    ]
    return TOPIC.ok("set: " + (" ".join(pairs) or "nothing that matters"))


def switch(settings: Mapping[str, str]) -> Finding:
    """Return whether kvpatch would be on in a vLLM started from this environment."""
    value = SWITCH.read(settings)
    if SWITCH.is_off(settings):
        return TOPIC.note(
            f"{SWITCH} is {value or 'unset'}: kvpatch is off; the rest is about having it on",
            f"start vLLM with {SWITCH}=1",
        )
    return TOPIC.ok(f"{SWITCH}={value}")
