"""The command line: it is fast where it can be, and an error is one line that says what to do."""

import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Annotated

import pytest
import typer

import headway
from headway import cli
from headway.errors import ConfigError, HeadwayError, ModelError, ScenarioError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs `headway` in this process and returns exit code, stdout and stderr."""
    monkeypatch.delenv("HEADWAY_DEBUG", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        out, err = capsys.readouterr()
        code = stop.value.code
        assert isinstance(code, int)
        return code, out, err

    return call


@pytest.fixture
def dummy(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """Put a command `bench` in the place of the real one; its module's `error` is raised when it runs."""
    module = types.ModuleType("dummy_command")

    def command(
        name: Annotated[str, typer.Argument(help="Whom to greet.")],
        times: Annotated[int, typer.Option(help="How often.")] = 1,
    ) -> None:
        """Greet somebody, as often as asked."""
        if module.error is not None:
            raise module.error
        typer.echo(f"hello {name} " * times)

    module.error = None
    module.command = command
    monkeypatch.setitem(sys.modules, "dummy_command", module)
    monkeypatch.setitem(cli.COMMANDS, "bench", cli.LazyCommand("dummy_command:command", "A dummy."))
    return module


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"headway {headway.__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
def test_what_needs_no_model_imports_none(arguments: list[str]) -> None:
    program = (
        "import sys; from headway.cli import main\n"
        f"try: main({arguments!r})\n"
        "finally: print(sorted({'torch', 'transformers', 'numpy', 'fastapi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "./no/such/model", "--port", "0"],
        ["serve", "--memory", "much"],
        ["inspect", "./no/such/model"],
        ["inspect", "--memory", "much"],
    ],
)
def test_a_cheap_error_does_not_wait_for_torch(arguments: list[str]) -> None:
    program = (
        "import sys; from headway.cli import main\n"
        f"try: main({arguments!r})\n"
        "finally: print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.startswith("headway: ")
    assert done.stdout.splitlines()[-1] == "[]"


def test_python_dash_m() -> None:
    command = [sys.executable, "-m", "headway", "--version"]
    assert subprocess.check_output(command, text=True) == f"headway {headway.__version__}\n"


def test_help_lists_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(name in out for name in cli.COMMANDS)


def test_a_command_runs_with_its_own_options(run: Run, dummy: types.ModuleType) -> None:
    assert run("bench", "you", "--times", "2") == (0, "hello you hello you \n", "")


def test_a_command_shows_its_own_help(run: Run, dummy: types.ModuleType) -> None:
    code, out, _ = run("bench", "--help")
    assert code == 0
    assert "headway bench" in out
    assert "Greet somebody, as often as asked." in out
    assert "--times" in out


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "you", "--tmies", "2"], ["--nothing"], ["serv"]])
def test_a_wrong_call_is_explained(run: Run, dummy: types.ModuleType, arguments: list[str]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "Usage: headway" in err


def test_a_misspelt_command_is_guessed(run: Run) -> None:
    assert "serve" in run("serv")[2].split("Did you mean", 1)[1]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("TP 3 is not divisible by DCP 2: choose TP 4"), 2),
        (ScenarioError("scenario 'x': no field 'groups'"), 2),
        (ModelError("no model at 'here'"), 2),
    ],
)
def test_an_error_is_one_line(run: Run, dummy: types.ModuleType, error: HeadwayError, code: int) -> None:
    dummy.error = error
    assert run("bench", "you") == (code, "", f"headway: {error}\n")


def test_debugging_shows_where_an_error_came_from(dummy: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_DEBUG", "1")
    dummy.error = ModelError("no model at 'here'")
    with pytest.raises(ModelError):
        cli.main(["bench", "you"])


@pytest.mark.parametrize(
    ("module", "extra"), [("torch", "serve"), ("transformers.cache_utils", "serve"), ("matplotlib", "report")]
)
def test_a_missing_extra_is_named(run: Run, dummy: types.ModuleType, module: str, extra: str) -> None:
    dummy.error = ModuleNotFoundError(f"No module named {module!r}", name=module)
    line = f"headway bench needs the {extra} extra: pip install 'headway[{extra}]'\n"
    assert run("bench", "you") == (2, "", line)


def test_a_missing_extra_is_named_when_the_command_is_imported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(cli.COMMANDS, "bench", cli.LazyCommand("torch:load", "Needs torch."))
    code, _, err = run("bench", "--help")
    assert (code, err) == (2, "headway bench needs the serve extra: pip install 'headway[serve]'\n")


def test_another_missing_module_is_a_fault_of_ours(dummy: types.ModuleType) -> None:
    dummy.error = ModuleNotFoundError("No module named 'headway.nothing'", name="headway.nothing")
    with pytest.raises(ModuleNotFoundError):
        cli.main(["bench", "you"])


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_exists_and_explains_itself(run: Run, name: str) -> None:
    code, out, _ = run(name, "--help")
    assert code == 0
    assert f"headway {name}" in out
