"""The site: pages for files outside of docs/ to which a page links, and tables that a phone can show."""

from __future__ import annotations

import itertools
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)((?:#[^)\s]*)?)\)")
TABLE = re.compile(r"<table>.*?</table>", flags=re.DOTALL)
CELL = re.compile(r"<(t[hd])\b[^>]*>(.*?)</\1>", flags=re.DOTALL)
HIDDEN = {"index.md": ["navigation"], "comparison.md": ["toc"]}  # beside these pages, for room
SENTENCE = 40  # letters, from which on a cell is text and no number or name


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each file and folder of the repository that a page links to. A link to none fails the strict build."""
    root = Path(config.docs_dir).parent
    for page in list(files.documentation_pages()):
        for target, _ in LINK.findall(Path(page.abs_src_path).read_text()):
            path = outside(page.src_uri, target)
            if path and (root / path).exists() and source_page(path) not in files.src_uris:
                files.append(File.generated(config, source_page(path), content=shown(root, path)))
    return files


def shown(root: Path, path: str) -> str:
    if (root / path).is_dir():
        return f"# {path}\n\n" + "".join(f"- {file.name}\n" for file in sorted((root / path).iterdir()))
    text = (root / path).read_text()
    return f"# {path}\n\n````python\n{text}````\n" if path.endswith(".py") else text


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files of the repository, whose pages are found by these links and not by the search."""
    if page.file.src_uri.startswith("source/"):
        page.meta["search"] = {"exclude": True}
    if page.file.src_uri == "reference/config.md":
        page.meta["search"] = {"boost": 4}  # names of settings are on many pages
    page.meta["hide"] = HIDDEN.get(page.file.src_uri, [])

    def link(found: re.Match[str]) -> str:
        path = outside(page.file.src_uri, found[1])
        if path is None:
            return found[0]
        return f"]({posixpath.relpath(source_page(path), posixpath.dirname(page.file.src_uri) or '.')}{found[2]})"

    return LINK.sub(link, markdown)


def on_page_content(html: str, **_: Any) -> str:
    return TABLE.sub(lambda found: labelled(found[0]), html)


def labelled(table: str) -> str:
    """Mark a table for site.css: `data-wide` for many columns, and `data-cards` where cells hold sentences, with the
    column's name in each cell. On a phone a row of these is shown as a card."""
    cells = [(tag, re.sub("<[^>]+>", "", content).strip()) for tag, content in CELL.findall(table)]
    names = [text for tag, text in cells if tag == "th"]
    if len(names) < 3:
        return table
    wide = " data-wide" * (len(names) > 6)
    if all(len(text) < SENTENCE for tag, text in cells if tag == "td"):
        return table.replace("<table>", f"<table{wide}>")
    columns = itertools.cycle(names)
    table = re.sub(r"<td\b", lambda _: f'<td data-column="{next(columns)}"', table)
    return table.replace("<table>", f"<table{wide} data-cards>")


def outside(page: str, target: str) -> str | None:
    """The path in the repository that a page's link goes to, if that is outside of docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") else path


def source_page(path: str) -> str:
    """The path in the site: Markdown for what `shown` makes a page of, and for all else the file itself."""
    return f"source/{path}.md" if posixpath.splitext(path)[1] in ("", ".py") else f"source/{path}"
