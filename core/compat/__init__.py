"""The only users of private names of torch. Each name has a reason, and a fallback without it."""
