"""This module builds the C kernels: for wheels and editable installs as hatchling's hook, in place as a script.

    python hatch_build.py   # builds src/ttrace/values/kernels/kernels.so for this checkout

They are a plain shared library that ctypes loads, so one wheel serves every Python of a platform. Where there is no
compiler, or none for this processor, the package is pure Python and computes with torch
(docs/decisions/0011-kernels.md). A compiler for another platform builds the wheel of that platform: `CC` is the
compiler, and `TTRACE_PLATFORM` the tag of the wheel, such as musllinux_1_2_aarch64 (.ci/wheels).
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "src" / "ttrace" / "values" / "kernels"
LIBRARY = FOLDER / "kernels.so"
SOURCES = {
    "stats.c": ["-ffp-contract=fast"],
    "generate.c": ["-ffp-contract=off"],
    "sketch.c": ["-ffp-contract=off"],
    "crc.c": [],
}
"""Compiled once per variant: sums may be fused, generated values must be the same bits everywhere."""

_X86 = {
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma"],
    "sse2": [],
}
VARIANTS: dict[str, dict[str, list[str]]] = {
    "x86_64": _X86,
    "AMD64": _X86,
    "aarch64": {"neon": []},
    "arm64": {"neon": []},
}
"""By machine, the flags of each variant; the library chooses among them at run time."""


PLATFORM = os.environ.get("TTRACE_PLATFORM", "")
"""The tag of the wheel, if it is not for the platform of this Python."""


def build() -> str:
    """Compile and link; says why not, if it cannot, and then leaves no library."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    LIBRARY.unlink(missing_ok=True)
    if shutil.which(compiler[0]) is None:
        return f"there is no C compiler {compiler[0]!r}"
    machine = _find_machine()
    if machine not in VARIANTS or sys.platform == "win32":
        return f"no variant is known for {machine} and {sys.platform}"
    try:
        with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
            compile_kernels(compiler, Path(scratch)).replace(LIBRARY)  # at once: others may be loading it
    except subprocess.CalledProcessError as error:
        return f"the compiler failed: {error.stderr.strip()}"
    return ""


def _find_machine() -> str:
    if not PLATFORM:
        return platform.machine()
    return next((machine for machine in VARIANTS if PLATFORM.endswith(f"_{machine}")), PLATFORM)


def compile_kernels(compiler: list[str], scratch: Path) -> Path:
    """Compile in the folder of the sources and link in the scratch folder, so that no path gets into the library."""
    common = [*compiler, "-std=gnu11", "-O3", "-fPIC", "-g0", "-Wall", "-Wextra"]
    objects = ["cpu.o"]
    _run([*common, "-c", "cpu.c", "-o", str(scratch / objects[0])], FOLDER)
    for variant, flags in VARIANTS[_find_machine()].items():
        for source, own in SOURCES.items():
            objects.append(f"{variant}_{source}.o")
            target = str(scratch / objects[-1])
            _run([*common, *flags, *own, f"-DVARIANT={variant}", "-c", source, "-o", target], FOLDER)
    linker_flags = shlex.split(os.environ.get("LDFLAGS", ""))
    _run([*compiler, "-shared", "-g0", "-Wl,-s", *objects, *linker_flags, "-o", LIBRARY.name], scratch)
    return scratch / LIBRARY.name


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    pass
else:

    class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
        """Tags the wheel with the platform it was built on, or leaves it pure where nothing could be built."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
            if self.target_name != "wheel":
                return
            problem = build()
            if problem:
                self.app.display_warning(f"built without kernels, torch computes instead: {problem}")
                return
            from packaging.tags import platform_tags

            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{PLATFORM or next(iter(platform_tags()))}"
            build_data["artifacts"].append(str(LIBRARY.relative_to(Path(self.root))))


if __name__ == "__main__":
    sys.exit(build() or 0)
