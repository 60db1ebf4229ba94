"""Tables, texts and pictures of plans, for people to read."""
