"""The judged suites: every test here speaks about the system under test, not about the plugin."""
