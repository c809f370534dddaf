"""A hook of mkdocs: links from pages to files outside docs/ lead to the repository."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace relative links that leave docs/ by addresses below `repo_url`."""
    folder = Path(page.file.abs_src_path).parent

    def replaced(link: re.Match[str]) -> str:
        path, mark, anchor = link[1].partition("#")
        target = (folder / path).resolve()
        if target.is_relative_to(ROOT / "docs") or not target.is_relative_to(ROOT):
            return link[0]
        return f"]({config.repo_url.rstrip('/')}/blob/main/{target.relative_to(ROOT)}{mark}{anchor})"

    return re.sub(r"\]\((\.\./[^)\s]+)\)", replaced, markdown)
