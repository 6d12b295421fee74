"""A stand-in for the CUDA libraries that a wheel of torch links.

Most versions of torch exist for CUDA only, and bring gigabytes of libraries that a CPU does not need. Their wheels run
on a CPU without them as soon as the dynamic linker finds every library and every symbol: one small library defines all
symbols, and has all names.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

NAME = "libttrace_stub.so"
_ANSWERS = {
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *n) { *n = 0; return 100; }",
    "cudaGetErrorString": 'const char *cudaGetErrorString(int e) { return "no CUDA here"; }',
    "cudaGetErrorName": 'const char *cudaGetErrorName(int e) { return "no CUDA here"; }',
    "cudaDriverGetVersion": "int cudaDriverGetVersion(int *n) { *n = 0; return 0; }",
}
"""What torch calls even where it does not use CUDA; 100 is `cudaErrorNoDevice`."""


def replace_cuda(folder: Path) -> None:
    """Make the torch in this folder importable without CUDA. Needs `cc`, `nm` and `readelf`."""
    libraries = folder / "torch" / "lib"
    own = [path for path in [*libraries.glob("*.so*"), *folder.glob("torch/_C*.so")] if path.is_file()]
    needed = {name for path in own for name in re.findall(r"NEEDED.*\[(.+?)\]", _run("readelf", "-dW", path))}
    installed = dict(re.findall(r"^\s+(\S+) \(libc6,x86-64.*=> (\S+)", _run("/sbin/ldconfig", "-p"), re.MULTILINE))
    present = {path.name for path in libraries.iterdir()} | set(installed)
    missing = sorted(name for name in needed - present if not name.startswith("ld-linux"))
    defined = {name for path in own for name, _, _ in _list_symbols(path, "--defined-only")}
    defined |= {
        name
        for library in needed & set(installed)
        for name, _, _ in _list_symbols(Path(installed[library]), "--defined-only")
    }
    undefined = [symbol for path in own for symbol in _list_symbols(path, "--undefined-only")]
    wanted = {name for name, kind, _ in undefined if kind == "U"} - defined
    _compile({name for name in wanted if not re.match("_?Py", name)}, undefined, folder)
    for name in missing:
        (libraries / name).symlink_to(NAME)


def drop_requirements(folder: Path) -> None:
    """Let the wheel require no CUDA libraries: pip would install them along with anything that needs torch."""
    [metadata] = folder.glob("torch-*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").splitlines(keepends=True)
    cuda = re.compile(r"Requires-Dist: (nvidia|cuda|triton)", re.IGNORECASE)
    metadata.write_text("".join(line for line in lines if not cuda.match(line)), encoding="utf-8")


def _compile(names: set[str], undefined: list[tuple[str, str, str]], folder: Path) -> None:
    versions: dict[str, set[str]] = {}  # the linker insists on the version that a symbol asks for
    for name, _, version in undefined:
        if version and name in names:
            versions.setdefault(version, set()).add(name)
    source, script = folder / "stub.c", folder / "stub.map"
    source.write_text("".join(_ANSWERS.get(n, f"long {n}(void) {{ return 0; }}") + "\n" for n in sorted(names)))
    script.write_text("".join(f"{v} {{ global: {'; '.join(sorted(ns))}; }};\n" for v, ns in sorted(versions.items())))
    options = [f"-Wl,--version-script,{script}"] if versions else []
    library = folder / "torch" / "lib" / NAME
    _run("cc", "-w", "-shared", "-fPIC", "-O1", "-fno-builtin", *options, "-o", library, source)


def _list_symbols(library: Path, which: str) -> list[tuple[str, str, str]]:
    """Every dynamic symbol with its kind, and its version or an empty text."""
    found = []
    for line in _run("nm", "-D", which, library).splitlines():
        *_, kind, symbol = line.split()
        name, _, version = symbol.partition("@")
        found.append((name, kind, version.lstrip("@")))
    return found


def _run(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout
