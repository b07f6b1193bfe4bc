"""Single-image continual test-time adaptation."""

__version__ = "0.1.0"
