"""The files of an upload, checked, without their bytes ever touching a disk."""

from __future__ import annotations

import asyncio
import hmac
import re
from hashlib import sha256
from pathlib import PurePosixPath, PureWindowsPath
from typing import get_args

from fastapi.exceptions import RequestValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from app.services import Services, visible
from ingest.extract import check, reading_limit_s
from ingest.jobs import OnDuplicate, Upload

_MAX_FILES = 100
_MAX_NAME = 200


async def read_uploads(request: Request, services: Services) -> list[Upload]:
    """Every file of a multipart request, in order.

    Raises:
        RequestValidationError, UnusableCollection: the request is not a usable form.
        FileRefused: one of the files cannot be ingested; none is taken then.
    """
    form = await _parse(request, services.settings.max_upload_bytes)
    try:
        collection = await asyncio.to_thread(services.collection, _text(form, "collection", "default"))
        on_duplicate = _on_duplicate(form)
        files = [value for name, value in form.multi_items() if name == "files" and isinstance(value, UploadFile)]
        if not files:
            raise _invalid("files", "send at least one file in a part named 'files'")
        uploads = []
        for file in files:
            name = await asyncio.to_thread(_redacted_name, clean_name(file.filename or ""), services)
            data = await file.read()
            kind = await services.checks.run(reading_limit_s(data), check, name, data)
            digest = hmac.new(services.key, data, sha256).hexdigest()
            uploads.append(Upload(name, kind, data, digest, collection, on_duplicate))
        return uploads
    finally:
        await form.close()


def clean_name(name: str) -> str:
    """A file name as a label: no folders, no control or direction marks, not too long; the suffix is kept."""
    name = PurePosixPath(PureWindowsPath(name).name).name
    name = visible(name)
    stem, dot, suffix = name.rpartition(".")
    if len(name) > _MAX_NAME:
        name = f"{stem[: _MAX_NAME - len(suffix) - 1]}{dot}{suffix}"[:_MAX_NAME]
    # Separators between words hide names from the recognizers.
    return re.sub(r"[_]+", " ", name) or "unnamed"


def _redacted_name(name: str, services: Services) -> str:
    """The name without personal data; its suffix, which tells the type, is not looked at."""
    stem, dot, suffix = name.rpartition(".")
    return f"{services.redact(stem).text}{dot}{suffix}" if stem else services.redact(name).text


async def _parse(request: Request, max_bytes: int) -> FormData:
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise _invalid("files", "send multipart/form-data with one or more parts named 'files'")
    parser = MultiPartParser(request.headers, request.stream(), max_files=_MAX_FILES, max_fields=10)
    # A part larger than this would go to a temporary file, unredacted; the body limit makes that impossible.
    parser.spool_max_size = max_bytes + 1
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise _invalid("body", error.message) from error
    except (UnicodeError, ValueError) as error:
        # The form names its charset, and some that Python knows fail in ways of their own.
        raise _invalid("body", "the form cannot be read; send it as UTF-8") from error


def _on_duplicate(form: FormData) -> OnDuplicate:
    value = _text(form, "on_duplicate", "skip")
    if value not in get_args(OnDuplicate):
        raise _invalid("on_duplicate", f"use one of {', '.join(get_args(OnDuplicate))}")
    return value  # type: ignore[return-value]


def _text(form: FormData, field: str, default: str) -> str:
    value = form.get(field, default)
    if not isinstance(value, str):
        raise _invalid(field, "send it as text, not as a file")
    return value


def _invalid(field: str, message: str) -> RequestValidationError:
    return RequestValidationError([{"loc": ("body", field), "msg": message, "type": "value_error"}])
