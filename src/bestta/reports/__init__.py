"""Tables, figures and pages from records."""

from bestta.reports.page import write_report
from bestta.reports.records import groups, read_records
from bestta.reports.tables import distance_table, forgetting_table, summary, tables

__all__ = [
    "distance_table",
    "forgetting_table",
    "groups",
    "read_records",
    "summary",
    "tables",
    "write_report",
]
