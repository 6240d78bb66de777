"""What can go wrong with stored documents.

RetrievalError
├── UnknownDocument       no document has this id
├── UnknownPage           the document has no such page
├── UnknownConversation   no conversation has this id
├── ReindexNeeded         the vectors were made by another embedding model
└── StorageFailed         the data folder cannot be read or written
"""


class RetrievalError(Exception):
    """Base of every error of this package."""


class UnknownDocument(RetrievalError):
    """No document has this id."""

    def __init__(self, id: str) -> None:
        super().__init__(f"there is no document {id!r}; list the documents with GET /v1/documents")


class UnknownPage(RetrievalError):
    """The document has no such page."""


class UnknownConversation(RetrievalError):
    """No conversation has this id."""

    def __init__(self, id: str) -> None:
        super().__init__(
            f"there is no conversation {id!r}, or a document that it was about has been deleted; start a new one"
        )


class ReindexNeeded(RetrievalError):
    """The vectors were made by another embedding model."""


class StorageFailed(RetrievalError):
    """The data folder cannot be read or written."""
