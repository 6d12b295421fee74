"""Two hosts write one trace, into a folder that both see or into a store; one that fails leaves no verdict."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bench._s3 import BUCKET, s3
from tests.support.faulty_machine.machine import HERE, TRAIN, Ended, Trials

PORT = "29517"


@pytest.fixture
def hosts(trials: Trials) -> Trials:
    """The machine, if it may have networks of its own."""
    needed = ("ip", "unshare", "hostname", "nsenter")
    if missing := [name for name in needed if shutil.which(name) is None]:
        pytest.skip(f"two hosts need {', '.join(missing)}")
    cable = "unshare --net --uts ip link add left type veth peer name right"
    if subprocess.run(cable.split(), capture_output=True, check=False).returncode:
        pytest.skip("this process may not have a network of its own (unshare --net)")
    return trials


def trace(trials: Trials, folder: Path, *faults: str, options: tuple[str, ...] = ()) -> Ended:
    """Trace a candidate on two hosts."""
    node = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "10.77.0.1", "--master-port", PORT)
    before = trials.machine.python("torchrun", *node)
    after = ("--no-python", *trials.machine.python(TRAIN, *faults))
    command = ("bash", str(HERE / "hosts.sh"), *before, "//", *after)
    return trials.trace(folder, "candidate", command, "--reference", "run/reference", *options)


def test_two_hosts_write_into_one_folder(hosts: Trials, tmp_path: Path) -> None:
    folder = hosts.start(tmp_path)
    traced = trace(hosts, folder, "attached:name")
    assert traced.status == 0, traced
    assert "86 tensors of 2 ranks" in traced.output
    log = (folder / "run" / "candidate.log").read_text()
    assert set(re.findall(r"rank (\d) on (\w+)", log)) == {("0", "one"), ("1", "two")}
    hosts.verify_bits(folder, 2, 2)
    checked = hosts.check(folder)
    assert (checked.status, "86 PASS" in checked.output) == (0, True), checked
    hosts.verify_nothing_left(folder)


@pytest.mark.parametrize(
    ("fault", "sentence", "num_steps"),
    [
        ("1@begin1:signal:SIGKILL", "ended with status 1", 1),
        ("1@start:shim:ERROR:28:write:chunk-:0:1", "could not be recorded: OSError: .*No space left", 2),
        ("1@begin1:cable", "ended with status 1|did not end within 12 s", 1),
    ],
    ids=["killed", "full", "cable-cut"],
)
def test_a_host_that_fails_is_no_verdict(
    hosts: Trials, tmp_path: Path, fault: str, sentence: str, num_steps: int
) -> None:
    folder = hosts.start(tmp_path)
    traced = trace(hosts, folder, fault, options=("--timeout", "12"))
    assert traced.status == 2, traced
    assert re.search(sentence, traced.output), traced
    hosts.verify_bits(folder, 2, num_steps)
    checked = hosts.check(folder)
    assert checked.status == 2, checked
    assert re.search("so nothing can be judged|could not be recorded", checked.output), checked
    hosts.verify_nothing_left(folder)


@pytest.mark.nightly
def test_two_hosts_write_into_s3(hosts: Trials, tmp_path: Path) -> None:
    """The hosts have no way to the server but this machine's loopback, so they share its network, not its name."""
    folder = hosts.start(tmp_path)
    with s3(0.0):
        store = f"s3://{BUCKET}/hosts"
        for name, options in (("reference", ()), ("twin-1", ("--twin", "1"))):
            known = ("--reference", "run/reference") if options else ()
            made = hosts.trace(folder, name, hosts.machine.python(TRAIN), "--store", store, *known, *options)
            assert made.status == 0, made
        node = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", PORT)
        nodes = [
            " ".join(
                (
                    f"unshare --uts bash -c 'hostname {host}; exec \"$@\"' -",
                    *hosts.machine.python("torchrun", *node, "--node-rank", str(number), "--no-python"),
                    *hosts.machine.python(TRAIN, "attached:name"),
                )
            )
            for number, host in enumerate(("one", "two"))
        ]
        command = ("bash", "-c", f"{nodes[0]} & {nodes[1]} && wait $!")
        traced = hosts.trace(folder, "candidate", command, "--store", store, "--reference", "run/reference")
        assert traced.status == 0, traced
        log = (folder / "run" / "candidate.log").read_text()
        assert set(re.findall(r"rank (\d) on (\w+)", log)) == {("0", "one"), ("1", "two")}
        hosts.verify_bits(folder, 2, 2)
        checked = hosts.machine.run("ttrace", "check", store, folder=folder)
        assert (checked.status, "86 PASS" in checked.output) == (0, True), checked
    hosts.verify_nothing_left(folder, "report.json")
