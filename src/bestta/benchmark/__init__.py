"""Methods over protocols: runs that can be stopped anywhere, one record each."""

from bestta.benchmark.config import (
    Method,
    Protocol,
    Run,
    Study,
    read_method,
    read_protocol,
    read_study,
    runs,
)
from bestta.benchmark.subjects import Subject

__all__ = [
    "Method",
    "Protocol",
    "Run",
    "Study",
    "Subject",
    "read_method",
    "read_protocol",
    "read_study",
    "runs",
]
