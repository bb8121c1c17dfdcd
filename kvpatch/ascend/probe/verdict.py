"""The verdict of the probe: files beside those of ``kvpatch verify``, and for what one holds.

It holds for the packages, the ACL runtime, the driver and the kind of device that were asked, and
for the probe's own code. Nothing of the device is called to compare them: vLLM's platform is to
start the runtime first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvpatch import verdicts
from kvpatch.ascend.probe.asking import RIGHT
from kvpatch.ascend.probe.questions import Answer
from kvpatch.ascend.runtime import LIBRARY, Runtime
from kvpatch.version import VERSION

HERE = Path(__file__).parents[1]  # the probe, and kvcached's calls on ACL
FOLDER = "npu"
_DRIVER = Path("/usr/local/Ascend/driver/version.info")
_PCI = Path("/sys/bus/pci/devices")
_HUAWEI = "0x19e5"
_PACKAGES = ("kvcached", "torch", "torch_npu", "vllm-ascend")


def machine(runtime: Runtime) -> dict[str, Any]:
    """Return what a verdict holds for, on this machine."""
    return {
        "kvpatch": VERSION,
        "code": _digest(path for path in sorted(HERE.rglob("*")) if path.suffix in (".py", ".h")),
        "versions": {name: _version(name) for name in _PACKAGES},
        "kvcached's extension": _digest(_extension()),
        "runtime": _digest([runtime.home / LIBRARY]),
        "emulated": runtime.emulated,
        "driver": _driver(),
        "devices": _devices(),
    }


def write(
    answers: Mapping[str, Answer], word: str, of: Mapping[str, Any], date: str, folder: Path
) -> Path:
    """Write a verdict over an earlier one of the same machine; return its path."""
    name = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:12]
    path = folder / FOLDER / f"probe-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    said = {name: {"right": one.right, "words": one.words} for name, one in answers.items()}
    content = {"verdict": word, "date": date, "machine": dict(of), "answers": said}
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
    return path


def passed(of: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> str:
    """Return the date on which the probe was right on a machine; empty if its newest was not."""
    same = [one for one in _every(environment) if one.get("machine") == of]
    newest = max((one["date"] for one in same), default="")
    # On one day, the wrong one.
    return newest if all(one["verdict"] == RIGHT for one in same if one["date"] == newest) else ""


def _every(environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for folder in verdicts.folders(environment):
        for path in sorted((folder / FOLDER).glob("*.json")):
            try:
                content = json.loads(path.read_text())
                if re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"]) and content["verdict"]:
                    yield content
            except (OSError, ValueError, KeyError, TypeError):
                continue  # it lifts nothing


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _extension() -> list[Path]:
    found = find_spec("kvcached")
    folders = (found.submodule_search_locations or ()) if found else ()
    return [path for folder in folders for path in sorted(Path(folder).glob("_C*.so"))]


def _driver() -> str:
    try:
        return " ".join(_DRIVER.read_text(errors="replace").split())
    except OSError:
        return ""


def _devices() -> list[str]:
    found = set()
    for path in _PCI.glob("*/vendor"):
        try:
            if path.read_text().strip() == _HUAWEI:
                found.add((path.parent / "device").read_text().strip())
        except OSError:
            continue
    return sorted(found)


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
