"""A mixture of experts from a Hugging Face model on this library."""
