"""The loops of native_code/, compiled for this CPU at first use and called through ctypes.

torch runs a decode step of a small model in some hundred small operations, each of which wakes all threads and walks
through memory that the one before has just left. The kernels do the same in loops that stay in the cache. They need a
C++ compiler; where there is none, or anything about them fails, generation runs in torch's own operations, about half
as fast, and `load_kernels` says why.

The library is kept in the user's cache folder under a name made of its source, its compiler and the CPU. It is linked
with the OpenMP library that torch has loaded: a second one would bring threads of its own, which fight with torch's.
"""

import ctypes
import functools
import hashlib
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cauce.engine.compilers import COMPILERS, find_compiler

FOLDER = Path(__file__).with_name("native_code")
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"),
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
)
OPENMP_LIBRARIES = ("libgomp", "libiomp5", "libomp")
COMPILE_TIMEOUT_S = 120.0
SUFFIXES = {torch.float32: "float", torch.bfloat16: "bf16"}

TILE_ROWS = 32  # what reads rows of a product reads so many at a time
TILE_SIZE = 32  # inputs and outputs of a product in tiles are multiples of it


class Attention(ctypes.Structure):
    """`struct Attention` of attention.cpp, field by field."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "joint",
                "cosine",
                "sine",
                "query_norm",
                "key_norm",
                "answer_keys",
                "answer_values",
                "prompt_keys",
                "prompt_values",
                "answer_length",
                "prompt_length",
                "prompt_row",
                "out",
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("rows", "heads", "key_heads", "width", "answer_capacity", "prompt_capacity", "window")
        ),
        *((name, ctypes.c_float) for name in ("scaling", "query_epsilon", "key_epsilon")),
        ("threads", ctypes.c_int32),
    )


class Kernels:
    """The functions of one compiled library, on tensors."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.has_tiles = bool(self._library.has_tiles())
        self._functions: dict[str, Any] = {}
        pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        for kind in SUFFIXES.values():
            self._declare(f"rms_norm_{kind}", [pointer] * 3 + [size] * 2 + [ctypes.c_float, number])
            self._declare(f"attend_{kind}", [ctypes.POINTER(Attention)])
            self._declare(f"draw_{kind}", [pointer] + [size] * 2 + [pointer] * 4 + [size] + [pointer] * 3 + [number])
        if self.has_tiles:
            self._declare("pack_tiles", [pointer] * 2 + [size] * 2 + [number])
            self._declare("multiply_tiles", [pointer] * 5 + [size] * 3 + [number])
            self._declare("gate_tiles", [pointer] * 6 + [size] * 3 + [number])

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x / sqrt(mean(x^2) + epsilon) * weight along the last dimension, in float32, rounded once."""
        x = x.contiguous()
        width = x.shape[-1]
        out = with_room(x.shape, x.dtype)
        self._functions[f"rms_norm_{SUFFIXES[x.dtype]}"](
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.numel() // width,
            width,
            epsilon,
            torch.get_num_threads(),
        )
        return out

    def attend(self, call: Attention, dtype: torch.dtype) -> None:
        """One layer of a decode step, as `call` describes it."""
        self._functions[f"attend_{SUFFIXES[dtype]}"](ctypes.byref(call))

    def draw(
        self,
        logits_RV: Tensor,
        divisor_R: np.ndarray,
        greedy_R: np.ndarray,
        row_N: np.ndarray,
        uniform_N: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens [N] (int64), their log-probs [N] (float32) and the summed weights of each row [R] (float64), which
        are not finite where the logits are not."""
        logits_RV = logits_RV.contiguous()
        num_rows, vocab = logits_RV.shape
        given = (
            np.ascontiguousarray(divisor_R, dtype=np.float32),
            np.ascontiguousarray(row_N, dtype=np.int64),
            np.ascontiguousarray(uniform_N, dtype=np.float64),
            np.ascontiguousarray(greedy_R, dtype=np.uint8),
        )
        token_N = np.empty(len(given[1]), dtype=np.int64)
        logp_N = np.empty(len(token_N), dtype=np.float32)
        total_R = np.empty(num_rows, dtype=np.float64)
        self._functions[f"draw_{SUFFIXES[logits_RV.dtype]}"](
            logits_RV.data_ptr(),
            num_rows,
            vocab,
            *(array.ctypes.data for array in given),
            len(token_N),
            *(array.ctypes.data for array in (token_N, logp_N, total_R)),
            torch.get_num_threads(),
        )
        return token_N, logp_N, total_R

    def pack(self, weight: Tensor) -> Tensor:
        """A bf16 weight [N, K] in the order in which `multiply` reads it; both are multiples of TILE_SIZE."""
        weight = weight.detach().contiguous()
        if not can_tile(weight):
            raise ValueError(
                f"weight {tuple(weight.shape)}, {weight.dtype}: tiles hold bf16 in multiples of {TILE_SIZE}"
            )
        packed = torch.empty_like(weight)
        self._functions["pack_tiles"](weight.data_ptr(), packed.data_ptr(), *weight.shape, torch.get_num_threads())
        return packed

    def multiply(self, x: Tensor, packed: Tensor, bias: Tensor | None, other: Tensor | None) -> Tensor:
        """x [..., K] W^T + bias + other [..., N], in bf16 with sums in float32."""
        x, rows = _rows(x)
        out = with_room((*x.shape[:-1], packed.shape[0]), x.dtype)
        if other is not None:
            other = other.contiguous()
        pointers = (x.data_ptr(), packed.data_ptr(), _pointer(bias), _pointer(other), out.data_ptr())
        self._functions["multiply_tiles"](*pointers, rows, *packed.shape, torch.get_num_threads())
        return out

    def gate(self, x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> Tensor:
        """silu(x G^T + gate_bias) * (x U^T + up_bias), in bf16 with sums in float32."""
        x, rows = _rows(x)
        out = with_room((*x.shape[:-1], gate.shape[0]), x.dtype)
        pointers = (
            x.data_ptr(),
            gate.data_ptr(),
            up.data_ptr(),
            _pointer(gate_bias),
            _pointer(up_bias),
            out.data_ptr(),
        )
        self._functions["gate_tiles"](*pointers, rows, *gate.shape, torch.get_num_threads())
        return out

    def function(self, name: str, arguments: Sequence[Any]) -> Any:
        """A function of the library that returns nothing, for ctypes to call."""
        function = getattr(self._library, name)
        function.argtypes, function.restype = list(arguments), None
        return function

    def _declare(self, name: str, arguments: Sequence[Any]) -> None:
        self._functions[name] = self.function(name, arguments)


def with_room(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor whose memory goes on to a whole number of TILE_ROWS rows."""
    rows = math.prod(shape[:-1])
    room = -(-rows // TILE_ROWS) * TILE_ROWS
    if room == rows:
        return torch.empty(shape, dtype=dtype)
    return torch.empty((room, shape[-1]), dtype=dtype)[:rows].view(shape)


def can_tile(weight: Tensor) -> bool:
    """Whether a weight [N, K] can lie in tiles."""
    return weight.dtype == torch.bfloat16 and all(size % TILE_SIZE == 0 for size in weight.shape)


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """x, contiguous and with room for whole tiles behind it, and how many rows it has."""
    width = x.shape[-1]
    rows = x.numel() // width
    ends = (x.storage_offset() + -(-rows // TILE_ROWS) * TILE_ROWS * width) * x.element_size()
    if not x.is_contiguous() or ends > x.untyped_storage().nbytes():
        x = with_room(x.shape, x.dtype).copy_(x)
    return x, rows


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def load_kernels() -> tuple[Kernels | None, str]:
    """The kernels and "", or None and why there are none. Compiles at the first call on a machine (2 seconds)."""
    try:
        path = _compiled(_openmp_of_torch())
        kernels = Kernels(path)
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        return None, _one_line(error)
    if len(_openmp_loaded()) != 1:
        return None, f"they brought a second OpenMP library: {', '.join(_openmp_loaded())}"
    return kernels, ""


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cauce" / "kernels"


def _compiled(openmp: str) -> Path:
    compiler = find_compiler()
    if compiler is None:
        raise OSError(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=COMPILE_TIMEOUT_S).stdout
    sources = sorted(FOLDER.iterdir())
    parts = (
        *(source.read_bytes() for source in sources),
        version,
        _cpu_flags().encode(),
        openmp.encode(),
        " ".join(FLAGS).encode(),
    )
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    folder = cache_folder()
    path = folder / f"kernels-{digest}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        library, made = Path(beside) / path.name, []
        for source in sources:
            if source.suffix == ".cpp":
                made.append(str(Path(beside) / source.with_suffix(".o").name))
                _run([compiler, *FLAGS, "-c", str(source), "-o", made[-1]])
        _run([compiler, "-shared", *made, openmp, "-o", str(library)])
        os.replace(library, path)
    return path


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_TIMEOUT_S)
    if done.returncode != 0:
        raise OSError(f"{Path(command[0]).name} failed: {_one_line(done.stderr)}")


def _cpu_flags() -> str:
    """What this CPU can do, in the words of the system: a cache folder may be shared between machines."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")


def _openmp_of_torch() -> str:
    loaded = _openmp_loaded()
    if not sys.platform.startswith("linux") or len(loaded) != 1:
        raise OSError(f"torch has loaded {len(loaded)} OpenMP libraries, and the kernels need to share one")
    return loaded[0]


def _openmp_loaded() -> list[str]:
    """Paths of the OpenMP libraries in this process."""
    if not sys.platform.startswith("linux"):
        return []
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}
    return sorted(path for path in paths if Path(path).name.startswith(OPENMP_LIBRARIES))


def _one_line(what: object) -> str:
    lines = str(what).strip().splitlines()
    return lines[0] if lines else type(what).__name__
