"""The engine that runs a checked call: settings, dispatch, programs of steps, memory, the compiled layer."""
