"""Jobs as text, and the environment of the processes."""

from shardc.launch.job import Job, Script
from shardc.runtime.cluster import RunConfig

CONFIG = RunConfig(1, 4, 2, "unix:/tmp/x/store", bytes(range(32)), "unix:/tmp/x/1", 3, 2, 5.0, 60.0)


def test_a_job_is_one_line_of_text():
    job = Job(CONFIG, 2, "/cache", "0,1", "/private", "/log")
    text = job.to_json()
    assert "\n" not in text
    assert Job.from_json(text) == job


def test_a_job_without_the_secret():
    text = Job(CONFIG).to_json(secret=False)
    assert CONFIG.secret.hex() not in text
    assert Job.from_json(text, CONFIG.secret) == Job(CONFIG)


def test_the_environment_of_devices():
    now = {"A": "1", "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_b=2", "NPROC": "100",
           "JAX_NUM_CPU_DEVICES": "8"}  # fmt: skip
    assert Script("s", devices=4).environment(now) == {
        "A": "1",
        "XLA_FLAGS": "--xla_b=2 --xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "NPROC": "100",
        "PJRT_NPROC": "32",
    }
    assert Script("s", devices=40).environment({"NPROC": "8"})["NPROC"] == "80"
    assert Script("s").environment(now) == now


def test_the_command():
    assert Script("s.py", ("--a", "1")).command() == ["s.py", "--a", "1"]
    assert Script("s", ("-m",), module=True).command() == ["-m", "s", "-m"]
