"""Engines of other vLLM releases: the fixtures and the oracle of the engine lane."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path

ENGINE = Path(__file__).parents[1] / "engine"
sys.path.insert(0, str(ENGINE))

# By its path: every lane has a module called conftest.
spec = util.spec_from_file_location("engine_conftest", ENGINE / "conftest.py")
assert spec is not None and spec.loader is not None
engine_conftest = util.module_from_spec(spec)
spec.loader.exec_module(engine_conftest)

device, engine, models = (
    engine_conftest.device,
    engine_conftest.engine,
    engine_conftest.models,
)
