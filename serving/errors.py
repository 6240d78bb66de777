"""What can go wrong with the model.

ServingError
├── StartError            the engine cannot start as configured; the message says what to change
│   ├── EngineMissing     no vLLM build is installed
│   └── ModelUnusable     the model folder is missing, incomplete or does not fit the settings
├── EngineUnavailable     starting, restarting, stopped or given up
├── EngineDied            the engine was lost while it worked on this request
├── Overloaded            too many requests wait already
└── PromptTooLong         the prompt and its answer do not fit the model's window
"""


class ServingError(Exception):
    """Base of every error of this package."""


class StartError(ServingError):
    """The engine cannot start as configured."""


class EngineMissing(StartError):
    """No vLLM build is installed."""


class ModelUnusable(StartError):
    """The model folder is missing, incomplete or does not fit the settings."""


class EngineUnavailable(ServingError):
    """The engine takes no requests now."""


class EngineDied(ServingError):
    """The engine was lost while it worked on this request."""


class Overloaded(ServingError):
    """Too many requests wait already."""


class PromptTooLong(ServingError):
    """The prompt and its answer do not fit the model's window; `at_least`: the prompt was not counted to its end."""

    def __init__(self, prompt_tokens: int, max_tokens: int, window: int, *, at_least: bool = False) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.window = window
        counted = f"{'at least ' if at_least else ''}{prompt_tokens:,}"
        super().__init__(
            f"the prompt has {counted} tokens and the answer may have {max_tokens:,}, "
            f"but the model's window is {window:,} tokens"
        )
