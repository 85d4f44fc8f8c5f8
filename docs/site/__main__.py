"""`python -m docs.site [FOLDER]` writes every page, those that come from the code, and `llms.txt` to build/docs, or to
FOLDER.

`zensical build` makes the site of it.
"""

import shutil
import sys
from pathlib import Path

from docs.site.client_page import client_page
from docs.site.flags_page import flags_page
from docs.site.llms import llms_text
from docs.site.loadgen_page import loadgen_page
from docs.site.pages import ROOT, site_files, with_glossary
from docs.site.routes_page import document, routes_page

BUILT = ROOT / "build/docs"


def write(folder: Path) -> None:
    """Write all that the site is built of to `folder`, which must be new or empty. Only the default one is replaced."""
    if folder == BUILT and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        sys.exit(f"{folder} is not empty")
    generated = {
        "reference/routes.md": routes_page(document()),
        "reference/flags.md": flags_page(),
        "reference/client.md": client_page(),
        "reference/loadgen.md": loadgen_page(),
    }
    files = with_glossary(site_files() | {path: text.encode() for path, text in generated.items()})
    files["llms.txt"] = llms_text(files).encode()
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else BUILT)
