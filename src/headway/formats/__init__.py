"""Traces of requests, read and written: what other tools publish, logs of chat APIs, and Headway's own recordings.

trace = read_trace("trace.jsonl.gz")
len(trace), trace.prompt(0), trace.times[0]
"""

from headway.formats.read import FORMATS, read_trace
from headway.formats.recording import RecordingWriter
from headway.formats.trace import Trace, TraceBuilder

__all__ = ["FORMATS", "RecordingWriter", "Trace", "TraceBuilder", "read_trace"]
