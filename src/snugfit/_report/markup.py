"""Pages and their pieces from jinja2's templates in this folder, which escape text. Imported only to draw."""

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader

_TEMPLATES = Environment(
    loader=PackageLoader("snugfit._report", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
)


class _Pieces:
    """The macros of ``pieces.html`` as functions, which return HTML."""

    _macros = _TEMPLATES.get_template("pieces.html").module

    def __getattr__(self, name: str) -> Callable[..., str]:
        macro: Callable[..., str] = getattr(self._macros, name)
        return macro


html = _Pieces()


def page(title: str, kicker: str, heading: str, sections: list[tuple[str, str]], **parts: Any) -> str:
    """A self-contained page (``page.html``): no scripts, no requests, light and dark, wide and narrow.

    The kicker is a line above the heading. A section is a title and HTML; one without HTML is left out. ``parts`` are
    ``lead`` and ``tiles``, below the heading.
    """
    template = _TEMPLATES.get_template("page.html")
    return template.render(title=title, kicker=kicker, heading=heading, sections=sections, **parts)
