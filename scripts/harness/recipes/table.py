"""scripts/recipes: what kvpatch's rules say of vLLM's recipes, as if on a node of eight GPUs.

No engine starts and no weights are read. Of every recipe, preset of its KV offloading and variant
it prints whether the rules admit it, or the code that refuses it and on what basis, and counts
what can be turned on beside it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from harness import console
from harness.markdown import render
from harness.recipes.configurations import DATA, DEFAULT, EXPERTS, Recipe, Recipes
from kvpatch import patches, rules, supported
from kvpatch.environ import FIRST_LIMIT, IDLE
from kvpatch.patches.suspend.rules import why_not
from kvpatch.refusal import Basis
from kvpatch.versions import Facts, Installed

ADMITTED = "admitted"
PAGE = "docs/vllm-recipes.md"


class Answer(NamedTuple):
    """What the rules say.

    Attributes:
        code: of the rule that refuses; empty if none does, and where what refuses is no rule.
        basis: ``ADMITTED``, or what the refusal is based on.
        why: the refusal; empty if it is admitted.
    """

    code: str
    basis: str
    why: str = ""

    @property
    def admitted(self) -> bool:
        """Whether it starts."""
        return self.basis == ADMITTED


def newest() -> str:
    """Return the newest validated release of vLLM."""
    return supported.validated()[-1]


def facts(vllm: str, environment: Mapping[str, str]) -> Facts:
    """Return the facts of a node with GPUs; its memory is not compared."""
    return Facts(
        vllm=Installed.release("vllm", vllm),
        kvcached=Installed.release("kvcached", supported.KVCACHED[-1]),
        environment=dict(environment),
        device="cuda",
        contiguous=True,
    )


def ask(config: Any, vllm: str, **environment: str) -> Answer:
    """Return what the rules say of a configuration."""
    every = rules.of(feature.rules for feature in patches.FEATURES)
    found = rules.check(config, facts(vllm, environment), every)
    return Answer(found.code, found.basis.value, str(found)) if found else Answer("", ADMITTED)


def ask_suspended(config: Any, vllm: str) -> Answer:
    """Return whether an engine of a configuration starts, and can be suspended."""
    started = ask(config, vllm)
    if not started.admitted:
        return started
    why = why_not(config, facts(vllm, {}))
    return Answer("", Basis.NOT_VALIDATED.value, why) if why else started


class Line(NamedTuple):
    """What is turned on beside a recipe, and the answers."""

    name: str
    answers: dict[Recipe, Answer]

    def share(self, preset: str, default: bool = False) -> str:
        """Return how many of a preset are admitted, of all variants or of the default ones."""
        of = [
            answer
            for one, answer in self.answers.items()
            if one.preset == preset and (not default or one.variant == DEFAULT)
        ]
        return f"{sum(one.admitted for one in of)} of {len(of)}"

    def shares(self, presets: Iterable[str], first: Iterable[str] = ()) -> list[str]:
        """Return the cell of each preset: at the defaults, and with variants, and what it was."""
        now = [f"{self.share(one, default=True)}, {self.share(one)}" for one in presets]
        return [f"{one} ({was})" for one, was in zip(now, first, strict=True)] if first else now


def lines(vllm: str, recipes: Recipes) -> list[Line]:
    """Return the answers on a release, by what is turned on."""

    def asked(name: str, ways: Iterable[Recipe], how: Callable[[Any], Answer]) -> Line:
        return Line(name, {one: how(recipes.configuration(one, vllm)) for one in ways})

    def start(**environment: str) -> Callable[[Any], Answer]:
        return lambda config: ask(config, vllm, **environment)

    return [
        asked("nothing", recipes.plain(), start()),
        asked("`kvpatch suspend`", recipes.plain(), lambda config: ask_suspended(config, vllm)),
        asked(f"`{IDLE}`", recipes.plain(), start(**{IDLE.name: "60s"})),
        asked(f"`{FIRST_LIMIT}`", recipes.plain(), start(**{FIRST_LIMIT.name: "95%"})),
        asked("the recipe's drafts", recipes.drafting(), start()),
        asked("expert parallelism", recipes.spread(EXPERTS), start()),
        asked("data parallelism of experts", recipes.spread(DATA), start()),
    ]


def refusing(found: Iterable[Line]) -> list[tuple[str, str, int, str]]:
    """Return the refusals: code, basis, how many answers have it, and one of them."""
    answers = [one for line in found for one in line.answers.values() if not one.admitted]
    counted = Counter((one.code, one.basis, _reason(one)) for one in answers)
    return [(code, basis, count, why) for (code, basis, why), count in counted.most_common()]


def _reason(answer: Answer) -> str:
    """Return the sentence of a refusal, without what is the model's own, or the remedy."""
    return answer.why.partition("; ")[0].partition("kvpatch refuses to start vLLM: ")[2] or (
        answer.why
    )


def rows(line: Line, presets: Iterable[str], recipes: Recipes) -> Iterator[list[str]]:
    """Yield a row for each model and variant: its ranks, and the answer of each preset."""
    presets = list(presets)
    by_model: dict[tuple[str, str], dict[str, Answer]] = {}
    for one, answer in line.answers.items():
        by_model.setdefault((one.model, one.variant), {})[one.preset] = answer
    for (model, variant), answers in by_model.items():
        ranks = recipes.ranks(Recipe(model, variant, presets[0]))
        yield [model, variant, str(ranks), *(_short(answers[preset]) for preset in presets)]


def _short(answer: Answer) -> str:
    return answer.basis if answer.admitted else f"{answer.basis} ({answer.code})"


def page() -> str:
    """Return the page of the documentation."""
    from harness.recipes import deployments  # which asks as this does

    recipes, vllm = Recipes(), newest()
    found = lines(vllm, recipes)
    return render(
        "vllm-recipes.md",
        vllm=vllm,
        first=recipes.first,
        read=deployments.READ,
        deployments=[(one, _short(answer)) for one, answer in deployments.answers(vllm)],
        source=recipes.source,
        presets=list(recipes.presets),
        lines=found,
        refusals=refusing(found),
        rows=list(rows(found[0], recipes.presets, recipes)),
    )


def section() -> str:
    """Return the section of README.md."""
    recipes, vllm = Recipes(), newest()
    return render(
        "readme-recipes.md",
        vllm=vllm,
        presets=list(recipes.presets),
        lines=lines(vllm, recipes),
    )


def main() -> int:
    """Print the table."""
    parser = console.parser("scripts/recipes", __doc__ or "")
    parser.add_argument("vllm", nargs="?", default=newest(), help="a release; default %(default)s")
    vllm, recipes = parser.parse_args().vllm, Recipes()
    found = lines(vllm, recipes)
    for row in rows(found[0], recipes.presets, recipes):
        print("\t".join(row))
    print()
    for line in found:
        for preset in recipes.presets:
            print(
                f"{line.name}, {preset}: {line.share(preset, default=True)} defaults, "
                f"{line.share(preset)} with variants"
            )
    print()
    for code, basis, count, why in refusing(found):
        print(f"{count}\t{code}\t{basis}\t{why}")
    return 0
