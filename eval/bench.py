"""Load on a running server with the OpenAI API, our own or anybody's: what is asked, and what the run has found."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.prompt import Source, build_messages
from eval.arms import Arm
from eval.errors import BadUsage, NotMeasured
from eval.findings import Level
from eval.load import Load, failure_of, measure_levels, serve_within
from eval.remote import RemoteServer
from eval.results import Results
from eval.served import Served, Server
from eval.tasks import TASKS
from eval.tasks.task import Question, build_context
from serving.engine import Message

Prompt = Sequence[Message]

_TASK = "facts-single"
# A foreign server is asked as it stands, and its prompts are read cold.
_ARM = Arm("exact")
# Of English text, until the server has told better.
_CHARACTERS_PER_TOKEN = 4.0


@dataclass(frozen=True, slots=True)
class Bench:
    """A whole run. `prompt_tokens` is their mean as the server counts them; `cached` is how many answered prompts found
    anything in its cache. Either is None where the server does not tell.
    """

    levels: tuple[Level, ...]
    prompt_tokens: float | None
    cached: int | None

    @property
    def failed(self) -> int:
        """Requests that were not answered."""
        return sum(sum(level.failures.values()) for level in self.levels)


class _Turn(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str = Field(min_length=1)


class _Line(BaseModel):
    # Lines of data sets hold more than is asked here.
    model_config = ConfigDict(strict=True)

    prompt: str | None = Field(None, min_length=1)
    messages: list[_Turn] | None = Field(None, min_length=1)


@contextlib.asynccontextmanager
async def connected(url: str, model: str | None, key: str | None, timeout_s: float) -> AsyncIterator[RemoteServer]:
    """A server at `url`, with or without `/v1`, that has this model; its first one when none is named.

    Raises:
        BadUsage: nothing answers there as the OpenAI API does, or there is no such model.
    """
    address = url.rstrip("/").removesuffix("/v1")
    async with RemoteServer.connect(address, model, key=key, timeout_s=timeout_s) as server:
        if model is not None and model not in server.models:
            known = ", ".join(map(repr, server.models)) or "none"
            raise BadUsage(f"the server at {url!r} has no model {model!r}; name one of its own with --model: {known}")
        yield server


def api_key(environment: dict[str, str]) -> str | None:
    """The key for the server, from FOREWORD_API_KEY or else OPENAI_API_KEY.

    Raises:
        BadUsage: it cannot stand in a header. Its value is not told.
    """
    for name in ("FOREWORD_API_KEY", "OPENAI_API_KEY"):
        if key := environment.get(name, "").strip():
            if not (key.isascii() and key.isprintable() and " " not in key):
                raise BadUsage(f"{name} holds characters that no key has; set it to the key alone")
            return key
    return None


async def probe(server: Server, load: Load, prompt: Prompt) -> float:
    """Send one prompt before the run; returns the characters of a token, as the server counts tokens.

    Raises:
        NotMeasured: it is not answered, though the server is neither busy nor slow; nothing else would be either.
    """
    served = await serve_within(server, prompt, _ARM, load.max_tokens, load.timeout_s)
    if served.error is not None and failure_of(served.error) == "error":
        raise NotMeasured(
            f"the server at {server.about['url']!r} does not answer as it should ({served.error}); "
            "ask it for one answer by hand first"
        )
    characters = sum(len(message.content) for message in prompt)
    return characters / served.prompt_tokens if served.prompt_tokens else _CHARACTERS_PER_TOKEN


def generated(
    numbers: range, prompt_tokens: int, seed: int, characters_per_token: float = _CHARACTERS_PER_TOKEN
) -> list[list[Message]]:
    """Unique prompts of about so many tokens: generated documents and a question, as the service asks it.

    Raises:
        BadUsage: so few tokens hold no document and no question.
    """

    def count(sources: Sequence[Source], question: Question) -> int:
        messages = build_messages(sources, question.text)
        return round(sum(len(message.content) for message in messages) / characters_per_token)

    prompts = []
    for number in numbers:
        try:
            context = build_context(
                _TASK,
                TASKS[_TASK],
                language="en",
                length=prompt_tokens,
                number=number,
                seed=seed,
                questions=1,
                count_prompt=count,
            )
        except ValueError as error:
            raise BadUsage(
                f"a prompt of {prompt_tokens:,} tokens is too short; ask for more --prompt-tokens"
            ) from error
        prompts.append(build_messages(context.sources, context.questions[0].text))
    return prompts


def numbered(numbers: range) -> list[list[Message]]:
    """Different questions that any document can be asked."""
    return [[Message("user", f"What do the documents say about number {number}?")] for number in numbers]


def read_prompts(path: Path) -> list[list[Message]]:
    """Prompts of a file of JSON lines such as `{"prompt": "..."}` or `{"messages": [{"role": ..., "content": ...}]}`.

    Raises:
        BadUsage: it cannot be read, has no line, or a wrong one.
    """
    try:
        # Not splitlines: JSON may hold other line ends than these within a text.
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadUsage(f"the prompts {str(path)!r} cannot be read ({error}); give a file of JSON lines") from error
    prompts = [_prompt(line, f"line {n} of {str(path)!r}") for n, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise BadUsage(f"the prompts {str(path)!r} hold no line; write one prompt a line")
    return prompts


def repeated(prompts: Sequence[Prompt], number: int) -> list[Prompt]:
    """So many prompts, from the beginning again where there are fewer."""
    return list(islice(cycle(prompts), number))


async def run_bench(
    server: Server, prompts: Sequence[Prompt], load: Load, *, results: Results, step: Callable[[], None]
) -> Bench:
    """Every level of the load, with `load.prompts` prompts.

    Args:
        step: called after each request that counts.

    Raises:
        BadUsage: there are too few prompts.
    """
    answers: list[Served] = []

    def done(served: Served) -> None:
        answers.append(served)
        step()

    levels = await measure_levels(server, _ARM, prompts, load, results=results, done=done)
    good = [served for served in answers if served.error is None]
    tokens = [served.prompt_tokens for served in good if served.prompt_tokens is not None]
    cached = [served.cached_tokens for served in good if served.cached_tokens is not None]
    return Bench(
        levels,
        prompt_tokens=sum(tokens) / len(tokens) if tokens and len(tokens) == len(good) else None,
        cached=sum(1 for found in cached if found) if cached and len(cached) == len(good) else None,
    )


def _prompt(line: str, where: str) -> list[Message]:
    """One prompt. A message about a wrong line does not repeat its text, which may be somebody's."""
    form = 'write {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
    try:
        read = _Line.model_validate(json.loads(line))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "it"
        raise BadUsage(f"{where}: {name}: {first['msg']}; {form}") from error
    except ValueError as error:
        raise BadUsage(f"{where} is no JSON; {form}") from error
    if read.prompt is not None and read.messages is None:
        return [Message("user", read.prompt)]
    if read.messages is not None and read.prompt is None:
        return [Message(turn.role, turn.content) for turn in read.messages]
    raise BadUsage(f"{where} has {'both' if read.prompt else 'neither'} of prompt and messages; {form}")
