"""Text in, text out: tokenizers, chat templates, streams of text, and what a request returns."""
