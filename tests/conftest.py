"""Eight fake CPU devices for every test; has to be said before JAX is imported."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["NPROC"] = "16"
os.environ["JAX_PLATFORMS"] = "cpu"
