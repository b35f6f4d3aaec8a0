"""A prediction is held against what an engine counted, and only where both saw the same traffic."""

import http.server
import threading
from pathlib import Path

import pytest
from tests.tell.results import figures

from headway.errors import ConfigError
from headway.tell.measured import Measured, on_measured, read_measured

OURS = """# HELP headway_prompt_tokens_total Prompt tokens.
headway_prompt_tokens_total 1000.0
headway_prompt_hit_tokens_total 300.0
vllm:prefix_cache_queries_total{model_name="m"} 1000.0
"""
VLLM = """vllm:prefix_cache_queries_total{engine="0",model_name="m"} 600.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 400.0
vllm:prefix_cache_hits_total{engine="0"} 1.5e2
"""
SGLANG = "sglang:prompt_tokens_total 50\nsglang:cached_tokens_total 20\n"


@pytest.mark.parametrize(
    ("text", "found"), [(OURS, ("Headway", 1000, 300)), (VLLM, ("vLLM", 1000, 150)), (SGLANG, ("SGLang", 50, 20))]
)
def test_counters_of_each_engine(tmp_path: Path, text: str, found: tuple[str, int, int]) -> None:
    path = tmp_path / "m.txt"
    path.write_text(text)
    measured = read_measured([str(path)])
    assert (measured.engine, measured.prompt_tokens, measured.hit_tokens) == found


def test_what_lies_between_two_moments(tmp_path: Path) -> None:
    first, last = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text(OURS)
    last.write_text(OURS.replace("1000.0", "1500.0").replace("300.0", "400.0"))
    between = read_measured([str(first), str(last)])
    assert (between.prompt_tokens, between.hit_tokens, between.token_hit_rate) == (500, 100, 0.2)
    with pytest.raises(ConfigError, match="give the earlier one first"):
        read_measured([str(last), str(first)])
    first.write_text(SGLANG)
    with pytest.raises(ConfigError, match="does not go on from"):
        read_measured([str(first), str(last)])
    with pytest.raises(ConfigError, match="once, or twice"):
        read_measured([str(first)] * 3)


def test_what_is_no_counters(tmp_path: Path) -> None:
    path = tmp_path / "m.txt"
    path.write_text("up 1\n")
    with pytest.raises(ConfigError, match="none of the counters"):
        read_measured([str(path)])
    path.write_text("headway_prompt_tokens_total many\n")
    with pytest.raises(ConfigError, match="is no counter"):
        read_measured([str(path)])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_measured([str(tmp_path / "absent")])
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:1/metrics: "):
        read_measured(["http://127.0.0.1:1"])


def test_a_server_is_asked_for_its_metrics() -> None:
    class Metrics(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/metrics"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(OURS.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert read_measured([f"http://127.0.0.1:{server.server_port}"]).hit_tokens == 300
        thread.join()


def test_the_sentence() -> None:
    predicted = figures(300, {"parted": 700})
    assert on_measured(predicted, Measured("vLLM", "m", 1000, 290)) == (
        "Predicted: 300 of 1,000 prompt tokens reused (30.0%). Measured by vLLM: 290 of 1,000 (29.0%), +1.0 points."
    )
    assert "cannot be compared" not in on_measured(predicted, Measured("vLLM", "m", 1009, 290))
    assert "cannot be compared" in on_measured(predicted, Measured("vLLM", "m", 1011, 290))
