"""Pages made of templates, and the tables in them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

LEFT, RIGHT = "---", "---:"


def head(*names: str, align: str = RIGHT) -> str:
    """Return the head of a table; ``align`` is of all columns but the first."""
    return f"{row(*names)}\n{row(LEFT, *[align] * (len(names) - 1))}"


def row(*cells: str) -> str:
    """Return a line of a table."""
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def table(names: Sequence[str], rows: Iterable[Sequence[str]], align: str = LEFT) -> str:
    """Return a whole table."""
    return "\n".join([head(*names, align=align), *(row(*cells) for cells in rows)])


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=select_autoescape(["html.jinja"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.globals.update(head=head, row=row, table=table)


def render(template: str, **values: Any) -> str:
    """Return a page of ``templates``, with values by the names that it has for them."""
    return TEMPLATES.get_template(f"{template}.jinja").render(values)


def put(page: str, name: str, section: str) -> str:
    """Return a page with another section between the markers of a name.

    Raises:
        SystemExit: the page has no such markers.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, opened, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise SystemExit(f"a page has no {begin} ... {end}")
    return f"{before}{begin}\n{section}{end}{after}"
