"""The engine: requests, their schedule, the cache of keys and values, and the steps."""
