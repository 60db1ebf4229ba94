"""The ways to start the processes of a run: on this machine, by ssh, by hand on each host, under a cluster, on Ray."""
