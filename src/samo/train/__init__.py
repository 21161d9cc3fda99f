"""The training loop behind ``samo train`` and ``samo demo``, and what surrounds it."""
