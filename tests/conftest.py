"""Eight fake CPU devices for the whole session: set before anything imports jax."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["NPROC"] = (
    "16"  # threads of XLA:CPU: collectives block in them, and with fewer than 2 for each device they can hang
)
os.environ["JAX_PLATFORMS"] = "cpu"
