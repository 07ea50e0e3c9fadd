"""What a run leaves behind: its numbers, its pages and their figures."""

from typing import TYPE_CHECKING

from fedstale.lazy import names_of

if TYPE_CHECKING:
    from fedstale.reports.account import STRATEGY, Advice
    from fedstale.reports.advice import advise
    from fedstale.reports.costs import account_figure, client_errors_in_words, note_advice
    from fedstale.reports.figure import (
        FROM_ZERO,
        SHARES,
        SOURCES,
        Array,
        Figure,
        accuracy_axis,
        band,
        cell_text,
        curve,
        line_mode,
        metric_text,
        reference,
        stepped,
        thinned,
        time_text,
        time_unit,
        without_folders,
    )
    from fedstale.reports.learning import BOOKKEEPING, by_kind, measured_names
    from fedstale.reports.page import (
        REPORT,
        Link,
        cards,
        lead,
        parts_in_words,
        write_figures,
        write_text,
    )
    from fedstale.reports.run import Run, parts_of, report_at_end
else:
    __getattr__, __dir__ = names_of(__name__)

__all__ = [
    "BOOKKEEPING",
    "FROM_ZERO",
    "REPORT",
    "SHARES",
    "SOURCES",
    "STRATEGY",
    "Advice",
    "Array",
    "Figure",
    "Link",
    "Run",
    "account_figure",
    "accuracy_axis",
    "advise",
    "band",
    "by_kind",
    "cards",
    "cell_text",
    "client_errors_in_words",
    "curve",
    "lead",
    "line_mode",
    "measured_names",
    "metric_text",
    "note_advice",
    "parts_in_words",
    "parts_of",
    "reference",
    "report_at_end",
    "stepped",
    "thinned",
    "time_text",
    "time_unit",
    "without_folders",
    "write_figures",
    "write_text",
]
