"""Uploading, listing, watching and deleting over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog

from app.services import UnusableCollection, collection_name
from tests.conftest import Service
from tests.documents import Report, as_pdf, as_text, empty, encrypted_pdf, not_a_pdf, scanned_pdf, truncated_pdf

REFUSED = [
    pytest.param("empty.txt", empty(), 422, "empty_file", id="empty"),
    pytest.param("blank.txt", b" \n\t ", 422, "empty_file", id="blank"),
    pytest.param("image.pdf", not_a_pdf(), 415, "unsupported_type", id="image named pdf"),
    pytest.param("image.png", not_a_pdf(), 415, "unsupported_type", id="image"),
    pytest.param("binary.txt", b"abc\x00\x01def", 415, "unsupported_type", id="binary named text"),
    pytest.param("scan.pdf", scanned_pdf(), 422, "no_text", id="scan"),
    pytest.param("secret.pdf", encrypted_pdf("x"), 422, "encrypted", id="password"),
    pytest.param("cut.pdf", truncated_pdf(), 422, "damaged", id="cut off"),
]


async def _count(service: Service) -> tuple[int, int]:
    documents = (await service.http.get("/v1/documents")).json()["documents"]
    return len(documents), service.services.vectors.count()


async def test_a_pdf_becomes_a_ready_document(service: Service, report_id: str, long_report: Report) -> None:
    document = (await service.http.get(f"/v1/documents/{report_id}")).json()
    assert document["status"] == "ready"
    assert document["pages"] == 40
    assert document["progress"] is None
    assert document["chunks"] == service.services.vectors.count(report_id) > 40
    planted = {item.kind for item in long_report.planted}
    assert planted <= set(document["entities"])
    fact = long_report.facts[1]
    page = (await service.http.get(f"/v1/documents/{report_id}/pages/{fact.page}")).json()
    assert fact.answer in page["text"]
    assert page["page"] == fact.page
    assert page["tokens"] > 0


@pytest.mark.parametrize(("name", "data", "status", "type"), REFUSED)
async def test_a_bad_file_is_refused_and_nothing_stored(
    service: Service, name: str, data: bytes, status: int, type: str
) -> None:
    before = await _count(service)
    response = await service.http.post("/v1/documents", files={"files": (name, data)})
    assert (response.status_code, response.json()["error"]["type"]) == (status, type)
    assert repr(name) in response.json()["error"]["message"]
    assert await _count(service) == before


async def test_one_bad_file_refuses_the_whole_request(service: Service) -> None:
    before = await _count(service)
    files = [("files", ("good.txt", b"The mast is red.")), ("files", ("bad.txt", b""))]
    response = await service.http.post("/v1/documents", files=files)
    assert response.status_code == 422
    assert await _count(service) == before


async def test_several_files_are_taken_at_once(service: Service) -> None:
    files = [("files", (f"{n}.txt", f"The mast number {n} is red.".encode())) for n in range(3)]
    response = await service.http.post("/v1/documents", files=files, data={"collection": "several"})
    assert response.status_code == 202
    assert [taken["name"] for taken in response.json()["documents"]] == ["0.txt", "1.txt", "2.txt"]


@pytest.mark.parametrize(
    ("request_arguments", "told"),
    [
        pytest.param({"json": {}}, "multipart/form-data", id="no form"),
        pytest.param({"files": {"other": ("a.txt", b"x")}}, "files", id="no part named files"),
        pytest.param({"files": {"files": ("a.txt", b"x")}, "data": {"on_duplicate": "maybe"}}, "skip", id="policy"),
        pytest.param(
            {"files": {"files": ("a.txt", b"x")}, "data": {"collection": "  "}}, "collection", id="collection"
        ),
    ],
)
async def test_an_unusable_form_is_refused(service: Service, request_arguments: dict[str, object], told: str) -> None:
    response = await service.http.post("/v1/documents", **request_arguments)  # type: ignore[arg-type]
    assert response.status_code == 422
    assert told in response.json()["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True], ids=["with a length", "without a length"])
async def test_a_body_over_the_limit_is_refused(service: Service, chunked: bool) -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'

    async def body() -> object:  # an async iterator makes httpx send chunks
        yield head
        for _ in range(30):
            yield b"x" * 100_000

    content = body() if chunked else head + b"x" * 3_000_000
    headers = {"content-type": "multipart/form-data; boundary=b"}
    response = await service.http.post("/v1/documents", content=content, headers=headers)  # type: ignore[arg-type]
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "body_too_large"
    assert "2 MB" in response.json()["error"]["message"]


async def test_the_same_bytes_are_kept_once(service: Service) -> None:
    data = b"The harbour light is green."
    first = await service.upload("a.txt", data, collection="twice")
    again = await service.http.post("/v1/documents", files={"files": ("b.txt", data)}, data={"collection": "twice"})
    assert again.json()["documents"][0] == {
        "id": first,
        "name": "b.txt",
        "duplicate": True,
        "status_url": f"/v1/documents/{first}",
    }
    elsewhere = await service.upload("a.txt", data, collection="elsewhere")
    assert elsewhere != first


async def test_replace_removes_the_older_document_of_the_name(service: Service) -> None:
    old = await service.upload("plan.txt", b"The gate is blue.", collection="plans")
    new = await service.upload("plan.txt", b"The gate is white.", collection="plans", on_duplicate="replace")
    # The older one goes right after the new one is ready.
    for _ in range(50):
        if (await service.http.get(f"/v1/documents/{old}")).status_code == 404:
            break
        await asyncio.sleep(0.1)
    listed = (await service.http.get("/v1/documents", params={"collection": "plans"})).json()["documents"]
    assert [document["id"] for document in listed] == [new]
    assert service.services.vectors.count(old) == 0


async def test_a_deleted_document_is_gone_everywhere(service: Service) -> None:
    id = await service.upload("gone.txt", b"The walrus password is kumquat.", collection="gone")
    assert (await service.http.delete(f"/v1/documents/{id}")).status_code == 204
    for path in (f"/v1/documents/{id}", f"/v1/documents/{id}/pages/1", f"/v1/documents/{id}/events"):
        response = await service.http.get(path)
        assert (response.status_code, response.json()["error"]["type"]) == (404, "unknown_document")
    assert (await service.http.delete(f"/v1/documents/{id}")).status_code == 404
    assert service.services.vectors.count(id) == 0
    # And it may come back.
    assert await service.upload("gone.txt", b"The walrus password is kumquat.", collection="gone") != id


async def test_an_unknown_page_is_told_with_the_number_of_pages(service: Service, report_id: str) -> None:
    response = await service.http.get(f"/v1/documents/{report_id}/pages/41")
    assert response.status_code == 404
    assert "40 pages" in response.json()["error"]["message"]


async def test_events_tell_the_stages_in_order(service: Service, long_report: Report) -> None:
    data = as_text(long_report.pages[:8])
    accepted = await service.http.post("/v1/documents", files={"files": ("stages.txt", data)}, data={"collection": "s"})
    id = accepted.json()["documents"][0]["id"]
    stages: list[str] = []
    async with service.http.stream("GET", f"/v1/documents/{id}/events") as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        async for line in events.aiter_lines():
            if line.startswith("data: "):
                status = json.loads(line.removeprefix("data: "))["status"]
                if not stages or stages[-1] != status:
                    stages.append(status)
    order = ["queued", "extracting", "redacting", "chunking", "embedding", "storing", "ready"]
    assert stages == [stage for stage in order if stage in stages]
    assert {"redacting", "ready"} <= set(stages)


async def test_a_running_ingest_can_be_cancelled(service: Service, long_report: Report) -> None:
    data = as_pdf(long_report.pages)
    accepted = await service.http.post(
        "/v1/documents", files={"files": ("stop.pdf", data)}, data={"collection": "stop"}
    )
    id = accepted.json()["documents"][0]["id"]
    response = await service.http.post(f"/v1/documents/{id}/cancel")
    assert response.json()["status"] == "cancelled"
    assert service.services.vectors.count(id) == 0
    refused = await service.ask("Where is it?", documents=[id])
    assert (refused.status_code, refused.json()["error"]["type"]) == (409, "not_ready")


async def test_a_name_is_a_label_without_personal_data(service: Service) -> None:
    data = b"The mast is white and stands alone."
    id = await service.upload("../../etc/Letter_from_Margaret_Ellison.txt", data, collection="names")
    name = (await service.http.get(f"/v1/documents/{id}")).json()["name"]
    assert "Ellison" not in name
    assert "/" not in name
    assert name.endswith(".txt")


async def test_the_service_answers_while_it_ingests(service: Service, long_report: Report) -> None:
    data = as_pdf(long_report.pages)
    accepted = await service.http.post(
        "/v1/documents", files={"files": ("busy.pdf", data)}, data={"collection": "busy"}
    )
    id = accepted.json()["documents"][0]["id"]
    answered = 0
    while (await service.http.get(f"/v1/documents/{id}")).json()["status"] != "ready":
        assert (await service.http.get("/health")).status_code == 200
        answered += 1
        await asyncio.sleep(0.05)
    assert answered > 10


@pytest.mark.parametrize(
    ("typed", "again"),
    [
        pytest.param("ledgers", "  ledgers\t", id="blanks"),
        pytest.param("Letters of Margaret Ellison", "Letters of Margaret Ellison ", id="personal data"),
        pytest.param("of_Margaret_Ellison", "of_Margaret_Ellison", id="underscores hide a name"),
        pytest.param("sea\u0301n\u200e", "se\u00e1n", id="composed and invisible characters"),
    ],
)
async def test_a_typed_name_always_finds_its_collection(service: Service, typed: str, again: str) -> None:
    id = await service.upload("sloop.txt", f"The sloop of {typed!r} is grey.".encode(), collection=typed)
    stored = (await service.http.get(f"/v1/documents/{id}")).json()["collection"]
    assert "Ellison" not in stored
    for name in (typed, again, stored):
        listed = (await service.http.get("/v1/documents", params={"collection": name})).json()["documents"]
        assert [document["id"] for document in listed] == [id]
        asked = (await service.ask("What colour is the sloop?", collection=name)).json()
        assert [document["id"] for document in asked["context"]["documents"]] == [id]


@pytest.mark.parametrize("name", ["", " ", "\u200e", "x" * 101, "mail a@b.org " * 7], ids=lambda name: repr(name)[:20])
async def test_a_name_of_no_collection_is_refused_everywhere(service: Service, name: str) -> None:
    answers = [
        await service.http.post("/v1/documents", files={"files": ("a.txt", b"x")}, data={"collection": name}),
        await service.http.get("/v1/documents", params={"collection": name}),
        await service.ask("Where is it?", collection=name),
    ]
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["type"]) == (422, "invalid_request")
        assert "collection: " in answer.json()["error"]["message"]


async def test_a_collection_is_redacted_once_and_stays_as_it_is(service: Service) -> None:
    redact = service.services.redact
    names = [
        "default",
        "my_docs",
        "Alice",
        "Margaret Ellison and my_docs",
        "a@b.org, Bob Jones",
        "<PERSON_3f9a1c>",
        "x" * 100,
    ]
    for name in names:
        stored = collection_name(name, redact)
        assert collection_name(stored, redact) == stored
    assert collection_name("default", redact) == "default"
    assert collection_name("my_docs", redact) == "my_docs"
    with pytest.raises(UnusableCollection, match="once placeholders stand"):
        collection_name("a@b.org " * 12, redact)


SURROGATE = "\ud800"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"question": f"Where is {SURROGATE}?"}, id="question"),
        pytest.param({"documents": [SURROGATE]}, id="id"),
        pytest.param({"mode": SURROGATE}, id="choice"),
        pytest.param({"collection": SURROGATE}, id="collection"),
        pytest.param({SURROGATE: 1}, id="name of a field"),
        pytest.param({"documents": {SURROGATE: SURROGATE}}, id="nested"),
    ],
)
async def test_half_a_character_in_a_question_is_an_invalid_request(service: Service, body: dict[str, Any]) -> None:
    content = json.dumps({"question": "Where is it?", **body})
    response = await service.http.post("/v1/ask", content=content, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["type"]) == (422, "invalid_request")


@pytest.mark.parametrize("charset", ["utf-8", "utf-7", "unicode_escape", "punycode", "idna", "undefined", "nonsense"])
@pytest.mark.parametrize("word", [b"\xed\xa0\x80", b"+2AA-", b"\\ud800", b"\xff"])
async def test_a_form_in_any_charset_is_taken_or_refused(service: Service, charset: str, word: bytes) -> None:
    content = (
        b'--b\r\nContent-Disposition: form-data; name="collection"\r\n\r\nhalf ' + word + b"\r\n"
        b'--b\r\nContent-Disposition: form-data; name="files"; filename="oar '
        + word
        + b'.txt"\r\n\r\nThe oar is teal.\r\n'
        b"--b--\r\n"
    )
    headers = {"content-type": f"multipart/form-data; boundary=b; charset={charset}"}
    response = await service.http.post("/v1/documents", content=content, headers=headers)
    assert response.status_code in (202, 422), response.text
    assert (await service.http.get("/v1/documents")).status_code == 200


@pytest.mark.parametrize("number", ["0", "-1", "2147483648", "9" * 30, "one", "%ed%a0%80"])
async def test_a_number_of_no_page_is_an_invalid_request(service: Service, report_id: str, number: str) -> None:
    response = await service.http.get(f"/v1/documents/{report_id}/pages/{number}")
    assert (response.status_code, response.json()["error"]["type"]) == (422, "invalid_request")


@pytest.mark.parametrize("id", ["%ed%a0%80", "%00", "%ff", "x" * 3000, "%E2%80%AE"])
async def test_an_id_of_any_kind_is_an_unknown_document(service: Service, id: str) -> None:
    for method, path in (("GET", ""), ("GET", "/pages/1"), ("GET", "/events"), ("POST", "/cancel"), ("DELETE", "")):
        response = await service.http.request(method, f"/v1/documents/{id}{path}")
        assert (response.status_code, response.json()["error"]["type"]) == (404, "unknown_document")


async def test_a_question_over_the_limit_is_told_so(service: Service) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'{"question": "'
        for _ in range(30):
            yield b"x" * 100_000

    response = await service.http.post("/v1/ask", content=body(), headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["type"]) == (413, "body_too_large")


async def test_a_mistake_of_our_own_is_answered_and_logged_without_its_text(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret text")

    monkeypatch.setattr(service.services.catalogue, "get", broken)
    with structlog.testing.capture_logs() as logged:
        response = await service.http.get("/v1/documents/d_1")
    assert (response.status_code, response.json()["error"]["type"]) == (500, "internal")
    assert {"event": "request_broke", "log_level": "error", "error": "ZeroDivisionError"} in logged
    assert "secret" not in response.text + str(logged) + caplog.text
    assert 'foreword_failures_total{type="internal"}' in (await service.http.get("/metrics")).text


async def test_an_error_that_nobody_waits_for_is_logged_without_its_text(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> None:
        raise ZeroDivisionError("secret text")

    with structlog.testing.capture_logs() as logged:
        task = asyncio.create_task(broken())
        await asyncio.sleep(0)
        del task
        await asyncio.sleep(0)
    assert {"event": "error_lost", "log_level": "error", "error": "ZeroDivisionError"} in logged
    assert "secret" not in str(logged) + caplog.text
