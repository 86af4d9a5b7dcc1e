"""Take what the pages link to outside of docs/ into the site: scripts, result files, CONTRIBUTING.md and its like.

A page of docs/ links to ``../examples/own_module.py``, as a reader of the repository needs it. On the site that file is
``files/examples/own_module.py``; the Markdown files of the root become pages.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
_CODE_IN_TABLE = re.compile(r"(?<=`)[^`\n]*\\\|[^`\n]*(?=`)")
_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(#[^)\s]*)?(?=\))")


def on_files(files, config):
    """Add the files that are not below docs/."""
    from mkdocs.structure.files import File

    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in PAGES)]
    for name in sorted({outside for page in pages for outside in _outside(page)}):
        files.append(File.generated(config, f"files/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Lead links to where a file is on the site. In tables, take the backslash from code, which needs none there."""
    source = _source(page.file.src_uri)
    above = "../" * page.file.src_uri.count("/")

    def on_site(found):
        target = _target(source, found[1])
        return found[0] if target is None else f"{above}{target}{found[2] or ''}"

    return _LINK.sub(on_site, _CODE_IN_TABLE.sub(lambda found: found[0].replace("\\|", "|"), markdown))


def _source(uri):
    return ROOT / uri if uri in PAGES else ROOT / "docs" / uri


def _target(source, link):
    """Where a link of a page leads on the site, from its root; None for what is no file of the repository."""
    path = (source.parent / link).resolve()
    if not path.is_relative_to(ROOT) or not path.is_file():
        return None
    name = path.relative_to(ROOT).as_posix()
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return name if name in PAGES else f"files/{name}"


def _outside(page):
    """Files of the repository that a page links to and that are no pages."""
    for link, _ in _LINK.findall(page.read_text()):
        target = _target(page, link)
        if target is not None and target.startswith("files/"):
            yield target.removeprefix("files/")
