"""Links of rustdoc's pages that lead to files which are not there: dead_links.py FOLDER..."""

import re
import sys
from pathlib import Path
from urllib.parse import unquote

#: Of other sites, and of scripts.
ELSEWHERE = re.compile(r"://|\$|^javascript:")

pages = [page for folder in sys.argv[1:] for page in Path(folder).rglob("*.html")]
dead = set()
for page in pages:
    for link in re.findall(r'href="([^"#?]+)', page.read_text()):
        if not ELSEWHERE.search(link) and not (page.parent / unquote(link)).exists():
            dead.add(f"{page}: {link}")
print(*sorted(dead), f"{len(pages)} pages, {len(dead)} dead links", sep="\n")
sys.exit(not pages or bool(dead))
