"""The only users of private names of torch. Each name has a reason.

Without a name, a module has a fallback or gives the reason for a refusal.
"""
