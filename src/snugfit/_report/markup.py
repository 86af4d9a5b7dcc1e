"""Pages and their pieces from jinja2's templates in this folder, which escape text. Imported only to draw."""

from collections.abc import Callable

from jinja2 import Environment, PackageLoader

from snugfit._report.formatting import count, duration, percent, share, size

_TEMPLATES = Environment(
    loader=PackageLoader("snugfit._report", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
_TEMPLATES.filters |= {"count": count, "duration": duration, "percent": percent, "share": share, "size": size}


class Macros:
    """The macros of a template as functions, which return HTML."""

    def __init__(self, template: str) -> None:
        self._macros = _TEMPLATES.get_template(template).module

    def __getattr__(self, name: str) -> Callable[..., str]:
        macro: Callable[..., str] = getattr(self._macros, name)
        return macro


html = Macros("pieces.html")


def page(
    title: str, kicker: str, heading: str, sections: list[tuple[str, str]], lead: str = "", tiles: str = ""
) -> str:
    """A self-contained page (``page.html``): no scripts, no requests, light and dark, wide and narrow.

    The kicker is a line above the heading; ``lead`` and ``tiles`` are HTML below it. A section is a title and HTML; one
    without HTML is left out.
    """
    template = _TEMPLATES.get_template("page.html")
    return template.render(title=title, kicker=kicker, heading=heading, sections=sections, lead=lead, tiles=tiles)
