"""Builds the native operations (kernels_pallas/native) if there is a C++ compiler; without them XLA runs those.

MAMBA_JAX_NO_NATIVE=1 leaves them out: the wheel is then pure Python, for every platform.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_SOURCES = Path("kernels_pallas/native")


class ParallelBuild(build_ext):
    """Compiles the sources of an extension on all cores; setuptools compiles them one after the other."""

    def build_extension(self, ext):
        one = self.compiler.compile

        def compile_all(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return [name for names in pool.map(lambda source: one([source], **options), sources) for name in names]

        self.compiler.compile = compile_all
        super().build_extension(ext)


def native_operations() -> list[Extension]:
    """The extension module, or nothing for a pure wheel."""
    if sys.platform not in ("linux", "darwin") or os.environ.get("MAMBA_JAX_NO_NATIVE", "0") not in ("", "0"):
        return []
    import jaxlib

    return [
        Extension(
            "kernels_pallas.native._handlers",
            # The largest first, so that no core is idle at the end.
            sources=sorted(map(str, _SOURCES.glob("*.cc")), key=lambda name: -os.path.getsize(name)),
            depends=sorted(map(str, _SOURCES.glob("*.h"))),
            include_dirs=[str(Path(jaxlib.__file__).parent / "include")],
            # Without the fourth, loops with conditions on floats (exponentials) are not vectorized.
            extra_compile_args=[
                *("-O3", "-std=c++17", "-fopenmp-simd", "-fno-trapping-math", "-fvisibility=hidden", "-g0", "-w")
            ],
            language="c++",
            # A wheel for release must have it: MAMBA_JAX_NATIVE=required turns a failed compilation into an error.
            optional=os.environ.get("MAMBA_JAX_NATIVE") != "required",
        )
    ]


setup(ext_modules=native_operations(), cmdclass={"build_ext": ParallelBuild})
