"""Where a C++ compiler is. No torch here: `cauce doctor` asks too."""

import shutil

COMPILERS = ("c++", "g++", "clang++")


def find_compiler() -> str | None:
    """The path of the first one there is."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)
