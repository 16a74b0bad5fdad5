"""Load tests of servers with OpenAI's interface, ours or others."""
