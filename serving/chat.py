"""Messages in a model's own chat template: the same for every engine that runs the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from serving.engine import Message
from serving.errors import ModelUnusable
from serving.model import ModelFolder


@dataclass(frozen=True)
class ChatTokenizer:
    """A model's tokenizer, loaded when it is first used."""

    folder: ModelFolder

    def count(self, text: str) -> int:
        """The number of tokens of a text, without any template."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat, as `Engine.render_chat` promises."""
        chat = [{"role": m.role, "content": self.disarm(m.content)} for m in messages]
        begun = bool(messages) and messages[-1].role == "assistant"
        ids = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=not begun, continue_final_message=begun, tokenize=True, return_dict=False
        )
        return list(ids)

    def disarm(self, text: str) -> str:
        """The text with every control token in it made plain text."""
        for token, harmless in self._control_tokens.items():
            text = text.replace(token, harmless)
        return text

    def require_template(self) -> None:
        """Refuse a model that was not made for questions.

        Raises:
            ModelUnusable: it has no chat template, or its tokenizer cannot be loaded.
        """
        try:
            template = self.tokenizer.chat_template
        except (OSError, ValueError) as error:
            raise ModelUnusable(f"the model {self.folder.name!r} cannot be loaded: {error}") from error
        if not template:
            raise ModelUnusable(
                f"the model {self.folder.name!r} has no chat template, so it is not made for questions; "
                "set FOREWORD_MODEL to a model that was tuned to follow instructions"
            )

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder.source)

    @cached_property
    def _control_tokens(self) -> dict[str, str]:
        """Every control token and the same text with a zero-width space inside, which no tokenizer takes for it."""
        # Besides the named ones, tokenizers have control tokens for code and tools, such as <filename>.
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return {token: token[0] + "\u200b" + token[1:] for token in (*self.tokenizer.all_special_tokens, *added)}
