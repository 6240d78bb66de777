"""Reports through the pipe: they arrive whole or not at all, and nobody waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.accel.channel import Inbox, Sender


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    inbox = Inbox()
    yield inbox
    inbox.close()


@pytest.fixture
def sender(inbox: Inbox) -> Sender:
    return Sender(str(inbox.path))


def _report(trace: str, length: int | None = None) -> dict[str, Any]:
    """One whose line, its end included, has this many bytes."""
    report = {"trace": trace, "text": ""}
    if length is not None:
        report["text"] = "x" * (length - len(json.dumps(report)) - 1)
    return report


def _fill(sender: Sender, lines: int = 40) -> None:
    """Send more than the 64 KiB that a pipe holds."""
    for number in range(lines):
        sender.send(_report(str(number), 4096))


def test_a_report_arrives_once(inbox: Inbox, sender: Sender) -> None:
    assert inbox.take("a") is None
    report = {"trace": "a", "path": "sparse", "kept_pages": 7, "fallback_reason": None, "text": "绿 \n"}
    sender.send(report)
    assert inbox.take("a") == report
    assert inbox.take("a") is None


def test_reports_are_taken_in_any_order(inbox: Inbox, sender: Sender) -> None:
    for trace in "abc":
        sender.send(_report(trace))
    assert [inbox.take(trace) for trace in "cxab"] == [_report("c"), None, _report("a"), _report("b")]


def test_the_last_report_of_a_name_counts(inbox: Inbox, sender: Sender) -> None:
    sender.send({"trace": "a", "kept_pages": 1})
    sender.send({"trace": "a", "kept_pages": 2})
    assert inbox.take("a") == {"trace": "a", "kept_pages": 2}
    assert inbox.take("a") is None


def test_two_senders(inbox: Inbox, sender: Sender) -> None:
    other = Sender(str(inbox.path))
    for number in range(20):
        sender.send(_report(f"a{number}", 500 + number))
        other.send(_report(f"b{number}", 500 - number))
    for number in range(20):
        assert inbox.take(f"a{number}") == _report(f"a{number}", 500 + number)
        assert inbox.take(f"b{number}") == _report(f"b{number}", 500 - number)


def test_another_process_sends(inbox: Inbox, root: Path) -> None:
    code = "import sys; from serving.accel.channel import Sender; Sender(sys.argv[1]).send({'trace': 'a'})"
    subprocess.run([sys.executable, "-c", code, str(inbox.path)], cwd=root, check=True)
    # The only other end of the pipe is gone, and it still holds what was written.
    assert inbox.take("a") == {"trace": "a"}
    assert inbox.take("b") is None


def test_a_full_pipe_loses_reports_and_holds_nobody_up(inbox: Inbox, sender: Sender) -> None:
    _fill(sender)
    arrived = [number for number in range(40) if inbox.take(str(number)) is not None]
    assert arrived == list(range(16))
    sender.send(_report("after"))
    assert inbox.take("after") == _report("after")


@pytest.mark.parametrize(("length", "arrives"), [(4095, True), (4096, True), (4097, False), (100_000, False)])
def test_a_line_that_would_be_torn_is_not_sent(inbox: Inbox, sender: Sender, length: int, arrives: bool) -> None:
    sender.send(_report("a", length))
    sender.send(_report("b"))
    assert (inbox.take("a") is not None) == arrives
    assert inbox.take("b") == _report("b")


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_half_a_line_waits_for_the_other_half(inbox: Inbox, cut: int) -> None:
    line = json.dumps(_report("a", 60)).encode() + b"\n"
    pipe = os.open(inbox.path, os.O_WRONLY)
    os.write(pipe, json.dumps(_report("before")).encode() + b"\n" + line[:cut])
    assert inbox.take("a") is None
    assert inbox.take("before") == _report("before")
    os.write(pipe, line[cut:])
    os.close(pipe)
    assert inbox.take("a") == _report("a", 60)


def test_the_oldest_of_too_many_reports_are_given_up() -> None:
    inbox = Inbox(keep=3)
    sender = Sender(str(inbox.path))
    for trace in "abcde":
        sender.send(_report(trace))
    assert [inbox.take(trace) is not None for trace in "abcde"] == [False, False, True, True, True]
    inbox.close()


@pytest.mark.parametrize("there", ["nowhere", "a folder", "a pipe that nobody reads"])
def test_without_a_reader_reports_are_dropped(there: str, tmp_path: Path) -> None:
    path = tmp_path / "reports"
    if there == "a folder":
        path.mkdir()
    elif there == "a pipe that nobody reads":
        os.mkfifo(path)
    Sender(str(path)).send(_report("a"))


def test_without_a_path_reports_are_dropped() -> None:
    Sender(None).send(_report("a"))


def test_reports_to_a_closed_inbox_are_dropped() -> None:
    inbox = Inbox()
    sender = Sender(str(inbox.path))
    inbox.close()
    sender.send(_report("a"))
    _fill(sender)


def test_closing_removes_the_pipe() -> None:
    inbox = Inbox()
    folder = inbox.path.parent
    assert (inbox.path.is_fifo(), inbox.path.stat().st_mode & 0o777) == (True, 0o600)
    inbox.close()
    assert not folder.exists()
