"""Collection rules of this checkout; the plugin itself comes from the installed entry point."""

collect_ignore_glob = ["build/*", "dist/*", "reports/*"]
