"""The conversation itself: values, pruning, turns, sessions, the store's contract. No disk, network or threads."""
