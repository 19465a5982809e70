"""What happens inside a runner's turn: model and tools in a loop, a batch of calls, slots for turns."""
