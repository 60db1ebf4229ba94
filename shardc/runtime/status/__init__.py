"""What a process says with its signs of life: how far its training loop is, and for whom it waits."""
