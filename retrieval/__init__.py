"""What is stored, and how it is found again. Knows no model but the embedding one."""
