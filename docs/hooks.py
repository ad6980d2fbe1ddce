"""The pages of the site that are not in docs/. mkdocs calls the functions whose names begin with `on_` (mkdocs.yml).

A link in the README, in docs/ or in a notebook is a path in the tree, so that it works on a code host. On the site the
file that it names has a page too: the README is the first page, a notebook becomes its cells with their stored
outputs, Markdown stays what it is, any other file is shown as text, and a folder as the list of its files. A link to
what does not exist ends the build.
"""

import os
import pathlib
import posixpath
import re
from collections.abc import Iterator

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = "experiments/notebooks"
# Code, which holds no links, or the target of a link to a file: no address, and no place on the same page.
_CODE_OR_LINK = re.compile(
    r"^ *(?P<fence>```+|~~~+).*?^ *(?P=fence) *$|`[^`\n]*`"
    r"|(?:(?<=\[)(?P<text>[^\[\]`]*))?\]\((?P<target>(?![\w+.-]+:|#)[^)\s#]+)",
    flags=re.MULTILINE | re.DOTALL,
)
_BADGES = re.compile(r"^\[!\[.*\n", flags=re.MULTILINE)  # they come from other hosts
_LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".c": "c", "": "sh"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the README, every notebook, and a page for every file that any page links to.

    Raises:
      PluginError: a link names what does not exist, or what is outside the tree.
    """
    notebooks = (f"{NOTEBOOKS}/{path.name}" for path in sorted((ROOT / NOTEBOOKS).glob("*.ipynb")))
    waiting = ["README.md", *notebooks, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith("docs/"):
            for file in _pages(path, config):
                files.append(file)
        new = {*_targets(path)} - seen
        seen |= new
        waiting += sorted(target for target in new if not target.startswith("docs/"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files of the tree into links to their pages, with the titles of these."""
    here = posixpath.dirname(page.file.src_uri)
    folder = posixpath.dirname(_path(page.file.src_uri))

    def to_page(found: re.Match[str]) -> str:
        link = found["target"]
        if link is None:  # code; in tables a code host wants `|` escaped, and Python's Markdown does not
            in_table = found["fence"] is None and markdown[markdown.rfind("\n", 0, found.start()) + 1] == "|"
            return found[0].replace("\\|", "|") if in_table else found[0]
        of_site = files.get_file_from_path(posixpath.normpath(posixpath.join(here, link)))
        target = posixpath.normpath(posixpath.join(folder, link))
        uri = link if of_site else posixpath.relpath(_uri(target), here or ".")
        return f"{_title(found['text'] or '', target)}]({uri}"

    return _CODE_OR_LINK.sub(to_page, markdown)


def _title(text: str, target: str) -> str:
    """The text of a link: where it is the name of the target, which serves a code host, the title of the page."""
    if text.endswith(".md") and target.endswith(text):
        return (ROOT / target).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    return text


def _targets(path: str) -> Iterator[str]:
    """The files of the tree that a file of the tree links to."""
    for found in _CODE_OR_LINK.finditer(_text(path)):
        link = found["target"]
        if link is None:
            continue
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if target.startswith("..") or not (ROOT / target).exists():
            raise PluginError(f"{path} links to {link}, and there is no {target} in the tree.")
        yield target


def _uri(path: str) -> str:
    """The page of a file of the tree, as a path in docs/."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith(f"{NOTEBOOKS}/") and path.endswith(".ipynb"):
        return f"notebooks/{pathlib.Path(path).stem}.md"
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def _path(uri: str) -> str:
    """The file of the tree that a page shows: the inverse of `_uri`."""
    if uri == "index.md":
        return "README.md"
    if uri.startswith("notebooks/"):
        return f"{NOTEBOOKS}/{pathlib.Path(uri).stem}.ipynb"
    if uri.startswith("source/"):
        path = uri.removeprefix("source/")
        return path if (ROOT / path).exists() else path.removesuffix(".md")
    return f"docs/{uri}"


def _text(path: str) -> str:
    """The Markdown of a file of the tree, without badges and a notebook's outputs; empty where there is none."""
    if path.endswith(".md"):
        return _BADGES.sub("", (ROOT / path).read_text(encoding="utf-8"))
    if path.endswith(".ipynb"):
        cells = nbformat.read(ROOT / path, as_version=4).cells
        return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    if (ROOT / path).is_dir():
        names = sorted(each.name for each in (ROOT / path).iterdir() if each.is_file())
        return "\n".join([f"# {path}", "", *(f"- [{name}]({posixpath.basename(path)}/{name})" for name in names)])
    return ""


def _pages(path: str, config: MkDocsConfig) -> Iterator[File]:
    """The page of a file of the tree, and a notebook's pictures."""
    text = _text(path)
    if path.endswith(".ipynb"):
        name = pathlib.Path(path).stem
        notebook = nbformat.read(ROOT / path, as_version=4)
        text, resources = MarkdownExporter().from_notebook_node(notebook, {"output_files_dir": f"{name}_files"})
        for picture, content in resources["outputs"].items():
            yield File.generated(config, f"notebooks/{picture}", content=content)
        title, _, rest = text.lstrip().partition("\n")
        text = f"{title}\n\n{_where_to_run(path, config)}\n{rest}"
    elif not text:
        language = _LANGUAGES.get(pathlib.Path(path).suffix, "text")
        source = (ROOT / path).read_text(encoding="utf-8")
        text = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n~~~~~~{language}\n{source}\n~~~~~~\n"
    yield File.generated(config, _uri(path), content=text)


def _where_to_run(path: str, config: MkDocsConfig) -> str:
    """How to run a notebook: its path, and Colab's address if the repository is known and on GitHub."""
    text = f"The notebook `{path}` with the outputs of a run. In a checkout `jupyter lab {path}` opens it."
    host, _, repository = (config.repo_url or "").rstrip("/").partition("github.com/")
    if host == "https://":
        branch = os.environ.get("REPOSITORY_BRANCH", "main")
        colab = f"https://colab.research.google.com/github/{repository}/blob/{branch}/{path}"
        text += f" [Open it in Colab]({colab})."
    return text
