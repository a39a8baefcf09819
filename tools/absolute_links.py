"""Makes the links of a document absolute, for the page of the package.

    python tools/absolute_links.py README.md v0.2.0

prints README.md with links into the tree of that tag or commit, and pictures as raw files. A
package index shows the README outside of the repository, where relative links lead nowhere. The
address of the repository is `Source` in `pyproject.toml`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path, PurePosixPath

LINK = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\]]*\])*\])\((?!\w+:|#)([^()\s]+)\)")
SOURCE = re.compile(r"\b(src|srcset|href)=\"(?!\w+:|#)([^\"]+)\"")


def absolute(text: str, path: str, repository: str, tag: str) -> str:
    """The document with absolute links.

    Args:
        text: Markdown.
        path: Of the document inside the repository.
        repository: Its address, without a slash at the end.
        tag: A tag, branch or commit.
    """
    folder = PurePosixPath(path).parent

    def address(target: str, kind: str) -> str:
        parts: list[str] = []
        for part in (folder / target).parts:
            if part == "..":
                parts.pop()
            else:
                parts.append(part)
        return f"{repository}/{kind}/{tag}/{'/'.join(parts)}"

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match[1] else "blob"
        return f"{match[1]}{match[2]}({address(match[3], kind)})"

    def quoted(match: re.Match[str]) -> str:
        kind = "blob" if match[1] == "href" else "raw"
        return f'{match[1]}="{address(match[2], kind)}"'

    # Code stays as it is.
    parts = re.split(r"(^```.*?^```|`[^`\n]*`(?!\]))", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(
        part if number % 2 else SOURCE.sub(quoted, LINK.sub(link, part))
        for number, part in enumerate(parts)
    )


def source() -> str:
    """The address of the repository."""
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    address: str = tomllib.loads(pyproject.read_text())["project"]["urls"]["Source"]
    return address


def main() -> None:
    """Prints the document."""
    path, tag = sys.argv[1:]
    print(absolute(Path(path).read_text(encoding="utf-8"), path, source(), tag), end="")


if __name__ == "__main__":
    main()
