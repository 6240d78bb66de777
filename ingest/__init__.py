"""A file becomes redacted, chunked text. Knows no model and no HTTP; writes only through `retrieval`."""
