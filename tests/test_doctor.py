"""The doctor's manners: exit codes, output, arguments, and a report however the script ends."""

from __future__ import annotations

import signal
import subprocess
import textwrap
from pathlib import Path

import pytest

from safetrain import doctor
from tests.doctor_host import command, environment, fork, spawn

TRAIN = """
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
kept = []
def train(steps, leak=False):
    for _ in range(steps):
        x = torch.randn(8, 4)
        loss = F.mse_loss(model(x), x[:, :1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if leak:
            kept.append(loss)
"""


@pytest.fixture
def write(tmp_path: Path):
    """Write a script that begins with `TRAIN`."""

    def write(body: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.write_text(TRAIN + textwrap.dedent(body))
        return path

    return write


# ---------------------------------------------------------------------- manners, in a fresh interpreter


def test_arguments_output_and_exit_code_are_the_scripts_own(write, tmp_path: Path) -> None:
    """Everything after the script is its own, options that look like the doctor's too. Paths stay relative."""
    script = write("""
        import os, sys, pickle
        class Thing: pass
        print(sys.argv, __name__, __file__, __package__, os.getcwd(), sys.path[0])
        print(pickle.loads(pickle.dumps(Thing())).__class__, sys.modules["__main__"].Thing is Thing)
        train(5)
        sys.exit(3)
    """)
    arguments = [script.name, "--steps", "7", "--json", "x", "-m", "y"]
    bare = spawn(arguments, cwd=tmp_path, watched=False)
    watched = spawn(arguments, cwd=tmp_path)
    assert (watched.code, watched.out) == (bare.code, bare.out) == (3, bare.out)
    assert "nothing found in 5 steps" in watched.err


def test_settings_made_before_torch_is_imported_still_count(tmp_path: Path) -> None:
    """Watching starts when the script has imported torch, not before."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, os\nprint('torch' in sys.modules)\nos.environ['OMP_NUM_THREADS'] = '3'\nimport torch\n"
        "print(torch.get_num_threads(), type(torch.__spec__.loader).__name__)\n" + TRAIN + "train(4, leak=True)\n"
    )
    environ = {k: v for k, v in environment().items() if k != "OMP_NUM_THREADS"}
    bare, watched = (
        subprocess.run(command([str(script)], watched=w), env=environ, capture_output=True, text=True, timeout=120)
        for w in (False, True)
    )
    assert watched.stdout == bare.stdout
    assert watched.stdout.splitlines()[0] == "False"


def test_a_script_without_torch_runs_and_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('hello')")
    ran = spawn(["plain.py"], cwd=tmp_path)
    assert (ran.code, ran.out, ran.findings) == (0, "hello\n", [])
    assert "never imported torch" in ran.err


def test_ctrl_c_ends_it_as_python_does_and_still_reports(write, tmp_path: Path) -> None:
    script = write("""
        import atexit, time
        atexit.register(lambda: print("exit handler ran", flush=True))
        train(8, leak=True)
        print("ready", flush=True)
        time.sleep(60)
    """)
    out = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        command([str(script)], ["--json", str(out)]),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "exit handler ran" in stdout
    assert "G101" in out.read_text()
    assert "1 warning in 8 steps" in stderr
    assert "KeyboardInterrupt" in stderr and "safetrain/doctor.py" not in stderr


def test_a_terminated_job_reports_and_dies_of_the_signal(write, tmp_path: Path) -> None:
    script = write("""
        import time
        train(8, leak=True)
        print("ready", flush=True)
        while True: time.sleep(0.1)
    """)
    process = subprocess.Popen(
        command([str(script)]), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert "G101" in stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_signal_in_the_middle_of_a_write_still_gets_its_report(write, stream: str) -> None:
    """The stream is locked by the very write that the signal interrupts."""
    ran = fork(
        write(f"""
        import io, signal, sys
        class Interrupted(io.FileIO):
            def write(self, data):
                signal.raise_signal(signal.SIGTERM)
                return super().write(data)
        train(8, leak=True)
        raw = Interrupted(sys.{stream}.fileno(), "w", closefd=False)
        sys.{stream} = io.TextIOWrapper(io.BufferedWriter(raw))
        print("half", file=sys.{stream}, flush=True)
    """)
    )
    assert ran.code == -signal.SIGTERM
    assert "1 warning in 8 steps" in ran.err


def test_a_handler_of_the_scripts_own_ends_it_its_way(write) -> None:
    """It may call the one it found, as trainers do that stop at the end of a step."""
    ran = fork(
        write("""
        import signal, sys
        found = signal.getsignal(signal.SIGTERM)
        def stop(number, frame):
            if callable(found): found(number, frame)
            print("saved"); sys.exit(5)
        signal.signal(signal.SIGTERM, stop)
        train(8, leak=True)
        signal.raise_signal(signal.SIGTERM)
    """)
    )
    assert (ran.code, ran.out, ran.codes()) == (5, "saved\n", ["G101"])


WORKERS = """
        from torch.utils.data import DataLoader, Dataset
        class Squares(Dataset):
            def __len__(self): return 48
            def __getitem__(self, i): return torch.full((4,), float(i)), torch.tensor([float(i)])
        if __name__ == "__main__":
            for x, y in DataLoader(Squares(), batch_size=8, num_workers=2, multiprocessing_context="CONTEXT"):
                loss = F.mse_loss(model(x / 48), y / 48)
                optimizer.zero_grad(); loss.backward(); optimizer.step()
            print(model.weight.sum().item())
"""


def test_forked_workers_stay_silent(write) -> None:
    """The report comes once, from the process that trains."""
    script = write(WORKERS.replace("CONTEXT", "fork"))
    bare, watched = fork(script, watched=False), fork(script)
    assert (watched.code, watched.out) == (0, bare.out)
    assert watched.err.count("nothing found in 6 steps") == 1


@pytest.mark.slow
def test_spawned_workers_find_the_classes_of_the_script(write, tmp_path: Path) -> None:
    script = write(WORKERS.replace("CONTEXT", "spawn"))
    bare = spawn([str(script)], cwd=tmp_path, watched=False)
    watched = spawn([str(script)], cwd=tmp_path)
    assert (watched.code, watched.out) == (0, bare.out)
    assert watched.err.count("nothing found in 6 steps") == 1


# ---------------------------------------------------------------------- endings


def test_an_uncaught_error_is_explained_before_the_scripts_own_traceback(write) -> None:
    script = write("""
        hidden = torch.zeros(8, 4)
        for step in range(4):
            hidden = torch.tanh(model(torch.randn(8, 4)) + hidden)
            loss = hidden.pow(2).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
    """)
    ran = fork(script)
    assert ran.code == 1
    assert "G121" in ran.codes()
    explained, traceback = ran.err.split("Traceback (most recent call last)")
    assert "G121 backward-twice" in explained and "hidden" in explained
    assert "safetrain/doctor.py" not in traceback and "safetrain/foreign" not in traceback
    assert (
        traceback.rstrip()
        .splitlines()[-1]
        .startswith("RuntimeError: Trying to backward through the graph a second time")
    )


FIRST_FORWARD = {
    "M404": "torch.cdist(model(torch.randn(8, 4)).repeat(10**7, 1), torch.zeros(10**7, 1))",
    "G125": "model.bias += 1",
    "G127": "with torch.inference_mode(): x = torch.randn(8, 4)\nmodel(x)",
}


@pytest.mark.parametrize(("code", "body"), FIRST_FORWARD.items(), ids=list(FIRST_FORWARD))
def test_an_error_before_any_backward_is_explained(write, code: str, body: str) -> None:
    """Also when there is no optimizer yet."""
    script = write(body)
    script.write_text(script.read_text().replace("optimizer = ", "# "))
    ran = fork(script)
    assert (ran.code, ran.codes()) == (1, [code])
    assert f"{code} " in ran.err.split("Traceback (most recent call last)")[0]


BY_HAND = """
        del model, optimizer
        w, b = torch.zeros(4, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
        for _ in range(12):
            for _ in range(2):
                x = torch.randn(8, 4)
                (F.mse_loss(x @ w + b, x[:, :1]) / 2).backward()
            with torch.no_grad():
                for p in (w, b):
                    p -= 0.1 * p.grad
                    CLEAR
"""


@pytest.mark.parametrize(
    ("clear", "codes"), [("pass", ["P209"]), ("p.grad = None", []), ("p.grad.zero_()", []), ("p.grad.mul_(0.9)", [])]
)
def test_steps_written_by_hand_must_clear_gradients(write, clear: str, codes: list[str]) -> None:
    ran = fork(write(BY_HAND.replace("CLEAR", clear)))
    assert ran.codes() == codes
    assert "in 12 steps" in ran.err
    assert not codes or sorted(ran.findings[0]["params"]) == ["b", "w"]


def test_an_ordinary_error_keeps_its_traceback_and_the_report(write) -> None:
    ran = fork(write("train(8, leak=True)\nraise ValueError('mine')\n"))
    assert ran.code == 1
    assert ran.codes() == ["G101"]
    assert ran.err.rstrip().endswith("ValueError: mine")


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit()", 0),
        ("sys.exit(5)", 5),
        ("sys.exit('no')", 1),
        ("os._exit(4)", 4),
        ("raise SystemExit(0)", 0),
        ("del model, optimizer", 0),
    ],
)
def test_however_it_ends_the_report_is_written(write, ending: str, code: int) -> None:
    ran = fork(write(f"import os, sys\ntrain(8, leak=True)\n{ending}\n"))
    assert ran.code == code
    assert ran.codes() == ["G101"]
    assert "1 warning in 8 steps" in ran.err


def test_a_training_in_a_thread_is_watched(write) -> None:
    """Also when the main thread is done before it, and while another thread runs models of its own."""
    ran = fork(
        write("""
        import threading, time
        other, stop = nn.Linear(4, 4), threading.Event()
        def serve():
            while not stop.is_set():
                with torch.no_grad(): other(torch.ones(1, 4))
                time.sleep(0.001)
        threading.Thread(target=serve, daemon=True).start()
        def work():
            time.sleep(0.05); train(8, leak=True); stop.set(); print("trained")
        threading.Thread(target=work).start()
    """)
    )
    assert (ran.code, ran.out) == (0, "trained\n")
    assert ran.codes() == ["G101"]


def test_a_child_process_of_the_script_does_not_report(write) -> None:
    ran = fork(
        write("""
        import os, sys
        train(3)
        if os.fork() == 0:
            train(20, leak=True)
            sys.exit(0)
        os.wait()
    """)
    )
    assert ran.code == 0
    assert ran.codes() == []
    assert ran.err.count("nothing found in 3 steps") == 1


def test_a_deleted_model_is_not_kept_alive(write) -> None:
    ran = fork(
        write("""
        import gc, weakref
        train(5)
        ref, grad = weakref.ref(model), weakref.ref(model.weight.grad)
        del model, optimizer
        print(ref(), grad())
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        train(5)
    """)
    )
    assert ran.out == "None None\n"
    assert ran.codes() == []


def test_what_a_short_run_in_a_function_showed_outlives_its_model(write) -> None:
    """All is gone when `main` has returned, and the verdict on a late start waits for the end of the run."""
    script = write("""
        del model, optimizer
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.aux = nn.Linear(4, 1), nn.Linear(4, 2)
            def forward(self, x): return self.body(x), self.aux(x)
        def main(average):
            net = Net()
            opt = torch.optim.AdamW(net.parameters())
            for _ in range(20):
                out, _ = net(torch.randn(8, 4))
                opt.zero_grad()
                out.pow(2).mean().backward()
                opt.step()
                if average:
                    with torch.no_grad(): net.aux.weight.mul_(0.9); net.aux.bias.mul_(0.9)
        import sys
        main("average" in sys.argv)
    """)
    ran = fork(script)
    assert ran.codes() == ["P201"]
    assert ran.findings[0]["params"] == ["aux.weight", "aux.bias"]
    assert fork(script, ["average"]).codes() == []


# ---------------------------------------------------------------------- options


def test_steps_stops_politely(write) -> None:
    """As `sys.exit()` does: the script's clean-up runs, its exit code is 0."""
    ran = fork(write("try:\n    train(1000)\nfinally:\n    print('cleaned up')\n"), options=["--steps", "12"])
    assert (ran.code, ran.out) == (0, "cleaned up\n")
    assert "nothing found in 12 steps" in ran.err


@pytest.mark.parametrize(("level", "code"), [("note", 1), ("warning", 1), ("error", 0)])
def test_fail_on_turns_findings_into_an_exit_code(write, level: str, code: int) -> None:
    assert fork(write("train(8, leak=True)"), options=["--fail-on", level]).code == code


def test_fail_on_leaves_the_scripts_own_failure_alone(write) -> None:
    assert fork(write("train(8, leak=True)\nraise SystemExit(7)"), options=["--fail-on", "warning"]).code == 7


@pytest.mark.parametrize(("rules", "codes"), [("P", []), ("G1", ["G101"]), ("-G101", []), ("G101,P201", ["G101"])])
def test_rules_selects_what_is_reported(write, rules: str, codes: list[str]) -> None:
    assert fork(write("train(8, leak=True)"), options=[f"--rules={rules}"]).codes() == codes


def test_the_report_says_what_was_in_order(write) -> None:
    """And about memory how much growth is excluded, which takes steps."""
    assert "graphs die with their step" in fork(write("train(4)")).err
    assert "memory rises" not in fork(write("train(4)")).err
    said = " ".join(fork(write("train(200)")).err.split())
    assert "memory rises by less than" in said
    late = write("train(150)\nfor _ in range(50): train(1); kept.append(torch.ones(10**5))")
    assert "memory rises" not in fork(late).err


def test_quiet_says_nothing_when_nothing_was_found(write) -> None:
    assert fork(write("train(8)"), options=["--quiet"]).err == ""
    assert "G101" in fork(write("train(8, leak=True)"), options=["--quiet"]).err


@pytest.mark.parametrize(
    "arguments",
    [[], ["--steps", "0", "x.py"], ["--rules", "nonsense", "x.py"], ["--fail-on", "never", "x.py"]],
)
def test_wrong_usage_is_refused_before_anything_runs(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        doctor.main(arguments)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_missing_script_and_an_unknown_rule_are_said_in_one_line(write, tmp_path: Path) -> None:
    missing = spawn(["nowhere.py"], cwd=tmp_path)
    assert missing.code == 2 and missing.err.startswith("safetrain doctor: there is no script 'nowhere.py'")
    unknown = spawn([str(write("train(2)"))], ["--rules", "Z999"], cwd=tmp_path)
    assert unknown.code == 2 and "no rule Z999" in unknown.err and "Traceback" not in unknown.err


# ---------------------------------------------------------------------- a judge that fails


def test_a_failing_judge_is_switched_off_and_the_script_does_not_notice(monkeypatch: pytest.MonkeyPatch, write) -> None:
    from safetrain.callbacks.base import Callback
    from safetrain.foreign import watching

    class Broken(Callback):
        def on_step_end(self, state: object) -> None:
            raise ZeroDivisionError("a bug of ours")

    real = watching.default_guards
    monkeypatch.setattr(watching, "default_guards", lambda report: [*real(report), Broken()])
    ran = fork(write("train(8, leak=True); print('done')"), trouble=True)
    assert (ran.code, ran.out, ran.codes()) == (0, "done\n", ["G101"])
    assert ran.err.count("ZeroDivisionError: a bug of ours") == 1
    assert "the script did not notice" in ran.err


def test_a_worker_that_dies_by_exit_does_not_wait_for_a_report(write) -> None:
    ran = fork(write("import os\nif os.fork() == 0: os._exit(9)\nos.wait(); train(3)\n"))
    assert ran.code == 0 and ran.err.count("nothing found") == 1
