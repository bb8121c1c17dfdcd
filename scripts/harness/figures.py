"""The look of the plots, and their SVG."""

import io
import re

import matplotlib
from matplotlib.figure import Figure

matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",  # text stays text, in the page's own font
        "svg.hashsalt": "kvpatch",
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#8a94a6",
        "axes.labelcolor": "#3d4757",
        "xtick.color": "#5b6678",
        "ytick.color": "#5b6678",
        "axes.grid": True,
        "grid.color": "#e6e9ef",
        "grid.linewidth": 0.8,
        "axes.axisbelow": True,
    }
)
BLUE, ORANGE, GRAY, GREEN = "#2563eb", "#ea7317", "#9aa4b5", "#15803d"


def svg(figure: Figure) -> str:
    """Return a figure as SVG without a date, so that it changes only with its data."""
    with io.StringIO() as file:
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        text = file.getvalue()
    # Not every version of the library ends its lines alike.
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
