"""The native operations (kernels_pallas/native): built where there is a C++ compiler, left out where there is none."""

import sys
from pathlib import Path

import jaxlib
from setuptools import Extension, setup

_SOURCES = Path("kernels_pallas/native")

handlers = Extension(
    "kernels_pallas.native._handlers",
    sources=sorted(str(path) for path in _SOURCES.glob("*.cc")),
    depends=sorted(str(path) for path in _SOURCES.glob("*.h")),
    include_dirs=[str(Path(jaxlib.__file__).parent / "include")],
    extra_compile_args=["-O3", "-std=c++17", "-fopenmp-simd", "-fvisibility=hidden", "-g0", "-w"],
    language="c++",
    optional=True,
)

setup(ext_modules=[handlers] if sys.platform in ("linux", "darwin") else [])
