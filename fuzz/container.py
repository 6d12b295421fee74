"""A run's files in one input: they are changed one by one, and get checksums that fit, as a hostile writer would do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch

from fuzz.mutation import mutate_json_text
from fuzz.records import mutate_record
from fuzz.target import Mutate
from ttrace.trace.seal import seal_document, seal_line, sum_of
from ttrace.values.checksum import compute_checksum

Files = dict[str, bytes]
"""By path in the folder of a run, the contents of its files."""
_PATH = re.compile(
    r"(reference|candidate)/rank-[0-9]{5,6}/"
    r"(manifest\.json|end\.json|records\.jsonl|collectives\.jsonl|chunk-[0-9]{4}\.safetensors)"
)
_SUM = re.compile(rb',\s*"sum": ?"[0-9a-f]{8}"\s*\}$')


def pack_files(files: Files) -> bytes:
    """Put files into one input: of each its path, its length and its contents."""
    return b"".join(b"%s %d\n%s\n" % (path.encode(), len(data), data) for path, data in files.items())


def unpack_files(data: bytes) -> Files:
    """Take the files out of an input, as far as it is one."""
    files: Files = {}
    while (end := data.find(b"\n")) >= 0:
        path, _, length = data[:end].decode("utf-8", "replace").partition(" ")
        if not _PATH.fullmatch(path) or not re.fullmatch("[0-9]{1,7}", length):
            break
        start, stop = end + 1, end + 1 + int(length)
        files[path], data = data[start:stop], data[stop + 1 :]
    return files


def read_files(folder: Path) -> Files:
    """Read all files of a run."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def write_files(files: Files, folder: Path, known: Files) -> None:
    """Write a run's files, but for those that are there already; `known` says which, and is brought up to date."""
    for path in known.keys() - files.keys():
        (folder / path).unlink()
    for path, data in files.items():
        if known.get(path) != data:
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)  # a file that is still mapped must keep its bytes
            place.write_bytes(data)
    known.clear()
    known.update(files)


def mutate_files(data: bytes, random: Random) -> bytes:
    """Change one file of a run; mostly give everything checksums that fit."""
    files = unpack_files(data)
    if not files:
        return data
    # Most of what a reader does is done with records.
    names = sorted(files) if random.random() < 0.5 else [path for path in files if path.endswith("records.jsonl")]
    path = random.choice(names or sorted(files))
    if random.random() < 0.03:
        del files[path]
    elif path.endswith(".jsonl"):
        is_ledger = path.endswith("collectives.jsonl")
        files[path] = _mutate_lines(files[path], random, mutate_json_text if is_ledger else mutate_record)
    elif path.endswith(".json"):
        files[path] = mutate_json_text(_unseal(files[path]), random)
    else:
        files[path] = _mutate_bytes(files[path], random)
    return pack_files(seal_files(files) if random.random() < 0.9 else files)


def _mutate_lines(data: bytes, random: Random, mutate: Mutate) -> bytes:
    lines = data.split(b"\n")[:-1]
    if not lines:
        return data
    at = random.randrange(len(lines))
    what = random.randrange(10)
    if what == 0:
        del lines[at]
    elif what == 1:
        lines.insert(at, random.choice(lines))
    else:
        lines[at] = mutate(_unseal(lines[at]), random).replace(b"\n", b"")
    return b"".join(line + b"\n" for line in lines)


def _mutate_bytes(data: bytes, random: Random) -> bytes:
    changed, what = bytearray(data), random.randrange(6)
    at = random.randrange(len(data) + 1)
    if what == 0:
        return bytes(changed[:at])
    if what == 1:
        return bytes(changed[:at] + random.randbytes(random.choice((1, 8, 100))) + changed[at:])
    for _ in range(random.choice((1, 1, 8)) if data else 0):
        changed[random.randrange(len(data))] = random.randrange(256)
    return bytes(changed)


def _unseal(data: bytes) -> bytes:
    return _SUM.sub(b"}", data)


def seal_files(files: Files) -> Files:
    """Give every line, document and tensor the checksum of what it holds now."""
    result = dict(files)
    for path in files:
        folder, _, name = path.rpartition("/")
        if name == "records.jsonl":
            result[path] = b"".join(_seal_records(folder, files))
        elif name == "collectives.jsonl":
            lines = files[path].split(b"\n")[:-1]
            result[path] = b"".join(_seal_line(_unseal(line)) + b"\n" for line in lines)
    for path in files:
        folder, _, name = path.rpartition("/")
        if name == "end.json":
            result[path] = _seal_end(_unseal(files[path]), folder, result)
        elif name.endswith(".json"):
            result[path] = _seal_document(_unseal(files[path]))
    return result


def _seal_records(folder: str, files: Files) -> Iterator[bytes]:
    """Seal the lines of a rank, each with the checksum of the bytes that it points to."""
    for line in files[f"{folder}/records.jsonl"].split(b"\n")[:-1]:
        body = _unseal(line)
        try:
            entry = json.loads(body)
            chunk, begin, end = entry["at"]
            held = files[f"{folder}/chunk-{chunk:04d}.safetensors"][begin:end]
            crc = f"{_compute_crc(held):08x}"
            body = re.sub(rb'"crc": ?"[0-9a-f]{8}"', f'"crc":"{crc}"'.encode(), body)
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # it points to nothing
        yield _seal_line(body) + b"\n"


def _compute_crc(data: bytes) -> int:
    return compute_checksum(torch.frombuffer(bytearray(data), dtype=torch.uint8)) if data else 0


def _seal_end(body: bytes, folder: str, files: Files) -> bytes:
    for name in ("records", "collectives"):
        held = files.get(f"{folder}/{name}.jsonl")
        if held is not None:
            own = f'"{name}_sum":"{sum_of(held)}"'.encode()
            body = re.sub(rf'"{name}_sum": ?"[0-9a-f]*"'.encode(), own, body)
    return _seal_document(body)


def _seal_line(body: bytes) -> bytes:
    try:
        return seal_line(body.decode()).encode()
    except UnicodeDecodeError:
        return body


def _seal_document(body: bytes) -> bytes:
    try:
        return seal_document(body.decode()).encode()
    except (UnicodeDecodeError, AssertionError):
        return body
