"""The steps of ``scripts/gpu run``, in order of worth."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Step:
    """One step, which runs in a process of its own.

    Attributes:
        name: on the command line, and of its result file.
        asks: what it answers.
        function: ``module:name``, of a ``Job`` and a ``Seen``.
        seconds: that it may take on a GPU.
        cuda: it is about the driver or kernels, which the host device does not have.
        python: of which environment, by number.
    """

    name: str
    asks: str
    function: str
    seconds: int = 240
    cuda: bool = False
    python: int = 0


def _step(name: str, asks: str, function: str, seconds: int = 240, cuda: bool = False) -> Step:
    return Step(name, asks, f"harness.gpu.{function}", seconds, cuda)


STEPS = (
    _step("probe", "what the driver's memory calls do and take", "probe:run", 100, cuda=True),
    _step(
        "conformance",
        "does the driver answer as CUDA's documentation says",
        "conformance:run",
        120,
        cuda=True,
    ),
    _step("kernels", "do vLLM's kernels compute what torch does", "kernels:run", 100, cuda=True),
    _step("plain", "does vLLM serve here without kvpatch", "engines:plain", 180),
    _step("offloading", "is OffloadingConnector right with kvpatch", "verify:offloading", 300),
    _step("simple", "is SimpleCPUOffloadConnector right with kvpatch", "verify:simple", 300),
    _step("verbs", "do the fence, limits and suspensions lose nothing", "engines:verbs"),
    _step("two", "do two engines lend each other the device's memory", "engines:two"),
    _step(
        "first-tokens", "when does a returning prompt have its first token", "engines:first", 420
    ),
    _step("copies", "how near are copies to the pinned ones", "copies:run", 60),
    _step("pool", "is a tier in the host pool right", "engines:pool"),
    _step("sleep", "does an engine wake up as it was", "engines:sleep"),
)
MORE = _step("release", "is it right on this vLLM too", "verify:offloading", 300)


def of(pythons: int) -> list[Step]:
    """Return the steps with so many environments: each but the first has one of its own."""
    more = (replace(MORE, name=f"release-{n + 1}", python=n) for n in range(1, pythons))
    return [*STEPS, *more]


def chosen(every: Iterable[Step], names: str) -> list[Step]:
    """Return the steps with names, in their order.

    Raises:
        ValueError: one of the names is no step's.
    """
    steps = {step.name: step for step in every}
    wanted = names.split(",")
    for name in wanted:
        if name not in steps:
            raise ValueError(f"there is no step {name!r}; there are {', '.join(steps)}")
    return [step for name, step in steps.items() if name in wanted]
