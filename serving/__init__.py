"""The model: an engine contract and what implements it. Knows nothing of documents or of HTTP."""
