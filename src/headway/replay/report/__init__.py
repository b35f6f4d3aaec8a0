"""One HTML page about one or several runs: figures, and above each of them what it says in words.

The page is one file without scripts: it can be mailed, attached to a ticket, printed, and opened without a network.
So figures are SVG drawings of matplotlib. Rejected: plotly, whose inlined library makes a page of 5 MB that a mail
filter may refuse, for values under the mouse that stand in the tables here.
"""

from headway.replay.report.page import report_page

__all__ = ["report_page"]
