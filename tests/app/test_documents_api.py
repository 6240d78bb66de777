"""Uploading, listing, watching and deleting over HTTP."""

from __future__ import annotations

import asyncio
import json

import pytest

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
