"""Take the pictures of docs/img: the live page on simulated engines under load.

Run: python -m tests.deploy.screenshots
"""

import base64
import tempfile
import time
from pathlib import Path

from tests.deploy.browser import chromium
from tests.deploy.compose import ROOT
from tests.deploy.node import node_under_load

# So long that all loads of the shape have passed, and the last one shows.
LOOK_S = 40
WIDTH, HEIGHT = 1280, 1500


def main() -> None:
    """Write page-light.png and page-dark.png."""
    folder = Path(tempfile.mkdtemp())
    (folder / "admin").write_text("the-admin-key")
    chosen = {"ADMIN_KEY_FILE": str(folder / "admin")}
    with node_under_load(folder, **chosen) as (_, url), chromium(folder) as browser:
        pages = {scheme: browser.page() for scheme in ("light", "dark")}
        for scheme, page in pages.items():
            page.call("Emulation.setFocusEmulationEnabled", enabled=True)  # both count as seen
            page.call("Emulation.setScrollbarsHidden", hidden=True)
            page.open(f"{url}/crossover/", scheme=scheme, width=WIDTH, height=HEIGHT)
        time.sleep(LOOK_S)
        for scheme, page in pages.items():
            picture = base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"])
            path = ROOT / f"docs/img/page-{scheme}.png"
            path.write_bytes(picture)
            print(f"{path.relative_to(ROOT)}: {len(picture) // 1024} KiB")


if __name__ == "__main__":
    main()
