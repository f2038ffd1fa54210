"""An exporter for test_programs.py: says that it ran, and leaves its result a while later."""

from __future__ import annotations

import sys
import time
from pathlib import Path

if __name__ == "__main__":
    there, said = map(Path, sys.argv[1:])
    with said.open("a") as file:
        file.write("exported\n")
    time.sleep(0.5)
    (there / "index.json").write_text("{}")
