"""What mkdocs does not know of this repository: pages outside of docs/, links to its files, pages of keys and notebook.

A Markdown file of the repository is a page, named in PAGES or below files/. Another file that a page links to is copied
below files/, code as a page. Links are those that GitHub follows; here they are turned to where their file lies.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import keys

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    "README.md": "start/readme.md",
    "eagle3/prompts/README.md": "reference/prompts.md",
    "eagle3/head/README.md": "reference/head.md",
    "eagle3/serving/README.md": "reference/serving.md",
    "benchmarks/README.md": "results/benchmarks.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changes.md",
    "SECURITY.md": "project/security.md",
}
KEYS = "reference/keys.md"
NOTEBOOK = "start/notebook.md"
CODE = {".py": "python", ".yaml": "yaml", ".toml": "toml"}
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCED = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def site_path(path: Path) -> str:
    """Return where a file of the repository lies in the site."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return PAGES.get(name) or f"files/{name}{'.md' if path.suffix in CODE else ''}"


def linked(page: Path) -> Iterator[Path]:
    """Yield the files of the repository that a page links to."""
    for target, _ in LINK.findall(FENCED.sub("", page.read_text())):
        if not target.startswith(("http:", "https:", "mailto:")):
            yield Path(os.path.normpath(page.parent / target))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for file in list(files):
        if file.src_uri.endswith((".py", ".yml")):
            files.remove(file)
    waiting = {*DOCS.rglob("*.md"), *(ROOT / name for name in PAGES)}
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        if not path.is_relative_to(DOCS):
            files.append(_file(path, site_path(path), config))
        if path.suffix == ".md":
            waiting |= {each for each in linked(path) if each.is_file() and each not in seen}
    files.append(File.generated(config, KEYS, content=keys.page()))
    files.append(File.generated(config, NOTEBOOK, content=notebook()))
    return files


def notebook() -> str:
    """Return the notebook as a page: its text, its code, and the outputs that are stored in it."""
    parts = []
    for cell in json.loads((DOCS / NOTEBOOK).with_suffix(".ipynb").read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![output of the cell](data:image/png;base64,{data['image/png'].strip()})")
            elif "text/html" in data:
                parts.append("".join(data["text/html"]))
            elif text := "".join(output.get("text", [])):
                parts.append(f"```text\n{text}```")
    return "\n\n".join(parts)


def _file(path: Path, place: str, config: MkDocsConfig) -> File:
    if path.suffix not in CODE:
        return File.generated(config, place, abs_src_path=str(path))
    name, text = path.relative_to(ROOT), path.read_text().replace("```", "`` `")
    head = "---\nsearch:\n  exclude: true\n---\n"
    return File.generated(config, place, content=f"{head}# {name}\n\n```{CODE[path.suffix]}\n{text}```\n")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    sources = {place: ROOT / name for name, place in PAGES.items()}
    source = sources.get(uri) or (ROOT / uri.removeprefix("files/") if uri.startswith("files/") else DOCS / uri)
    if uri == KEYS:
        return markdown
    parts = FENCED.split(markdown)
    return "".join(part if part.startswith("```") else _turned(part, source, uri) for part in parts)


def _turned(text: str, source: Path, uri: str) -> str:
    def turn(found: re.Match[str]) -> str:
        target, heading = found[1], found[2] or ""
        if target.startswith(("http:", "https:", "mailto:", "data:")):
            return found[0]
        path = Path(os.path.normpath(source.parent / target))
        folder = KEYS if path.is_relative_to(ROOT / "conf") else PAGES["README.md"]
        place = folder if path.is_dir() else site_path(path)
        return f"]({os.path.relpath(place, Path(uri).parent)}{heading})"

    return LINK.sub(turn, text)
