"""JSON documents of a trace: each is sealed when it is written, and refused if it has changed since."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import BaseModel

from ttrace.errors import TraceError
from ttrace.trace.format import FORMAT, End, Manifest
from ttrace.trace.seal import open_document, seal_document
from ttrace.untrusted import parse_json

_Model = TypeVar("_Model", bound=BaseModel)


def parse_manifest(text: str, where: str) -> Manifest:
    """Parse a rank's manifest. Most manifests differ only in the rank: they share the rest in memory."""
    text = _open(text, where)
    before, *rest = _RANK.split(text, maxsplit=1)
    if len(rest) == 2:
        with suppress(TraceError):
            shared = _manifest_around(before, rest[1])
            if shared.rank == 7:
                return shared.model_copy(update={"rank": int(rest[0])})
    return _validate(Manifest, text, where)


_RANK = re.compile(r'(?<="rank": )(0|[1-9][0-9]{0,9})(?=,)')


@lru_cache(maxsize=128)
def _manifest_around(before: str, after: str) -> Manifest:
    return _validate(Manifest, f"{before}7{after}", "")


def parse_end(text: str, where: str) -> End:
    return validate(End, text, where)


def seal_model(model: BaseModel) -> str:
    """Return a document of a trace as its file has it."""
    return seal_document(model.model_dump_json(indent=1))


def validate(model: type[_Model], text: str, where: str) -> _Model:
    """Parse a document; raise TraceError if it is not what was written."""
    return _validate(model, _open(text, where), where)


def _open(text: str, where: str) -> str:
    try:
        return open_document(text, where)
    except TraceError:
        with suppress(ValueError, AttributeError, RecursionError):  # the first format had no seals
            _check_format(parse_json(text, where), where)
        raise


def _check_format(document: dict[str, Any], where: str) -> None:
    version = document.get("format", FORMAT)
    if version != FORMAT:
        raise TraceError(f"{where}: format {version}, but this TTrace reads format {FORMAT}. Trace again.")


def _validate(model: type[_Model], text: str, where: str) -> _Model:
    try:
        _check_format(parse_json(text, where), where)
        return model.model_validate_json(text, strict=True)
    except (ValueError, AttributeError, RecursionError) as error:
        raise TraceError(f"{where} is damaged: {' '.join(str(error).split())}") from None
