"""A discrete-event simulator: the real scheduler and cache manager, simulated arrivals, device and clock."""
