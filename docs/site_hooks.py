"""Pages of the site for files outside of docs/: where a page links to one, the site has it."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)((?:#[^)\s]*)?)\)")


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
    def link(found: re.Match[str]) -> str:
        path = outside(page.file.src_uri, found[1])
        if path is None:
            return found[0]
        return f"]({posixpath.relpath(source_page(path), posixpath.dirname(page.file.src_uri) or '.')}{found[2]})"

    return LINK.sub(link, markdown)


def outside(page: str, target: str) -> str | None:
    """The path in the repository that a page's link goes to, if that is outside of docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") else path


def source_page(path: str) -> str:
    """The path in the site: Markdown for what `shown` makes a page of, and for all else the file itself."""
    return f"source/{path}.md" if posixpath.splitext(path)[1] in ("", ".py") else f"source/{path}"
