"""The steps of ``scripts/gpu run``, in order of worth."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

HERE = "harness.gpu"


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


STEPS = (
    Step(
        "probe", "what the driver's memory calls do and take", f"{HERE}.probe:run", 100, cuda=True
    ),
    Step(
        "conformance",
        "does the driver answer as CUDA's documentation says",
        f"{HERE}.conformance:run",
        120,
        cuda=True,
    ),
    Step(
        "kernels",
        "do vLLM's kernels compute what torch does",
        f"{HERE}.kernels:run",
        100,
        cuda=True,
    ),
    Step("plain", "does vLLM serve here without kvpatch", f"{HERE}.engines:plain", 180),
    Step(
        "offloading", "is OffloadingConnector right with kvpatch", f"{HERE}.verify:offloading", 300
    ),
    Step("simple", "is SimpleCPUOffloadConnector right with kvpatch", f"{HERE}.verify:simple", 300),
    Step("verbs", "do the fence, limits and suspensions lose nothing", f"{HERE}.engines:verbs"),
    Step("two", "do two engines lend each other the device's memory", f"{HERE}.engines:two"),
    Step(
        "first-tokens",
        "when does a returning prompt have its first token",
        f"{HERE}.engines:first",
        420,
    ),
    Step("copies", "how near are copies to the pinned ones", f"{HERE}.copies:run", 60),
    Step("pool", "is a tier in the host pool right", f"{HERE}.engines:pool"),
    Step("sleep", "does an engine wake up as it was", f"{HERE}.engines:sleep"),
)
MORE = Step("release", "is it right on this vLLM too", f"{HERE}.verify:offloading", 300)


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
