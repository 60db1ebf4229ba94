"""`python -m shardc run`: starts the processes of a run, shows their output once, restarts and ends them.

    launcher (Supervisor) --starts--> process 0, 1, ... (child: joins the run, then runs the script)
       StoreServer <------- signs of life, failures --------'

On several hosts each host's launcher is an agent that starts processes for the supervisor of process 0. No process of
this room starts a JAX backend but the child.
"""
