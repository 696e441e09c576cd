"""Cauce: reinforcement learning of language models on Ray, with a durable journal.

The names below are the Python interface. They are loaded when first used (PEP 562), so that `import cauce`
and the command line's quick answers need neither torch nor ray.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cauce.interface import Actor, Learner, Trainer
    from cauce.journal import Buffer
    from cauce.recipe import load_recipe

__version__ = "0.1.0"
__all__ = ["Actor", "Buffer", "Learner", "Trainer", "__version__", "load_recipe"]

_HOMES = {
    "Actor": "cauce.interface",
    "Learner": "cauce.interface",
    "Trainer": "cauce.interface",
    "Buffer": "cauce.journal",
    "load_recipe": "cauce.recipe",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the module it lives in."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cauce' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
