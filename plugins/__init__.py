"""The plugin host: discovery, selection, loading."""

if __name__ != "opgraft.plugins":
    raise ImportError(
        f"this package is opgraft.plugins, imported as {__name__!r}: run from an installed opgraft"
    )
