"""The workers: processes or actors that compute steps, and executors that reach the workers."""
