"""Where people train: one module for each library that losses are plugged into. None is imported unless asked for."""
