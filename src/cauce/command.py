"""How this installation's command is called, for the lines that tell a person what to type next."""

import os
import shutil
import sys
from pathlib import Path


def command() -> str:
    """`cauce` where the shell finds this one, else the path of the script; relative where it lies below."""
    script = Path(sys.executable).with_name("cauce")
    found = shutil.which("cauce")
    if found and (not script.exists() or Path(found).resolve() == script.resolve()):
        return "cauce"
    if not script.exists():
        return f"{sys.executable} -m cauce"
    here = os.path.relpath(script)
    return str(script) if here.startswith("..") else here
