"""Where the parts of a CUDA toolkit are: Python wheels, CUDA_HOME, CUDA_PATH, /usr/local/cuda."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_INSTALLED = Path("/usr/local/cuda")
_TRITON = Path("backends", "nvidia", "bin")


def homes() -> list[Path]:
    """The directories of installed toolkits, whether they exist or not, the first choice first."""
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    return [*(Path(home) for home in named if home), _INSTALLED]


def wheels() -> list[Path]:
    """The directories of the Python wheels of CUDA 13, which are laid out as a toolkit is."""
    try:
        import nvidia
    except ImportError:
        return []
    return [Path(path) / "cu13" for path in nvidia.__path__]


def executables(name: str) -> list[str]:
    """Paths of a program: on PATH, in a toolkit, in wheels, in Triton's wheel; the first choice
    first."""
    folders = [*(home / "bin" for home in homes()), *(wheel / "bin" for wheel in wheels())]
    places = [os.environ.get("PATH", ""), *map(str, [*folders, *_triton()])]
    found = (shutil.which(name, path=place) for place in places)
    return list(dict.fromkeys(path for path in found if path is not None))


def _triton() -> Iterator[Path]:
    """The directory of the programs in Triton's wheel, which is not imported for it."""
    spec = importlib.util.find_spec("triton")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(place) / _TRITON


@cache
def includes() -> tuple[Path, ...]:
    """The directories of the CUDA toolkit's headers and of CCCL's headers; wheels come first."""
    roots = [*wheels(), *homes()]
    toolkits = [root / "include" for root in roots if (root / "include" / "cuda_fp16.h").is_file()]
    toolkits.sort(
        key=lambda path: not (path / "crt" / "host_defines.h").is_file()
    )  # wheels can lack headers that a host compiler needs
    cccl = [
        root / "include" / "cccl"
        for root in roots
        if (root / "include" / "cccl" / "cuda" / "std" / "limits").is_file()
    ]
    return (*toolkits[:1], *cccl[:1])
