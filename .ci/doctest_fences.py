"""Show the examples of docstrings as code on the site: ``>>>`` begins a quotation in Markdown."""

import re

from griffe import Extension

_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class DoctestFences(Extension):
    """Puts every example, which ends at a blank line, between the fences of a block of code."""

    def on_alias_instance(self, *, alias, **_):
        """Count names that are imported for type checkers alone: ``snugfit`` imports them when they are used."""
        alias.runtime = True

    def on_package(self, *, pkg, **_):
        """Change the docstring of ``snugfit`` itself."""
        self.on_object(obj=pkg)

    def on_object(self, *, obj, **_):
        """Change the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
