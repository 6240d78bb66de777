"""Why a file cannot be taken in. The message is shown to the user, so it never holds document text.

IngestError
├── FileRefused          the file itself is the cause
│   ├── EmptyFile        no bytes
│   ├── UnsupportedType  neither text, Markdown nor PDF
│   ├── EncryptedFile    a password is needed to read it
│   ├── DamagedFile      it cannot be parsed
│   └── NoText           it holds no text at all
├── WorkerCrashed        the process that read the file died, took too long or cannot be started
└── QueueFull            too many bytes wait already
"""


class IngestError(Exception):
    """Base of every error of this package."""


class FileRefused(IngestError):
    """The file itself is the cause."""


class EmptyFile(FileRefused):
    """No bytes."""


class UnsupportedType(FileRefused):
    """Neither text, Markdown nor PDF."""


class EncryptedFile(FileRefused):
    """A password is needed to read the file."""


class DamagedFile(FileRefused):
    """The file cannot be parsed."""


class NoText(FileRefused):
    """The file holds no text at all."""


class WorkerCrashed(IngestError):
    """The process that read the file died, took too long or cannot be started."""


class QueueFull(IngestError):
    """Too many bytes wait already."""
