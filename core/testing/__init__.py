"""The proof of ops, and the inventory of what a process has of them."""
