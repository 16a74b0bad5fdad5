"""The built-in platforms. An entry point leads to each, as for other platforms."""

if __name__ != "opgraft.platforms":
    raise ImportError(
        f"this package is opgraft.platforms, imported as {__name__!r}: run from an installed "
        "opgraft"
    )
