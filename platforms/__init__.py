"""The built-in platforms, each reached through its entry point like anyone's."""

if __name__ != "opgraft.platforms":
    raise ImportError(
        f"this package is opgraft.platforms, imported as {__name__!r}: run from an installed opgraft"
    )
