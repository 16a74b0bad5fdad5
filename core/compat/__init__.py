"""The one place for private names of torch: each with the reason for it, and what happens where it is missing."""
