"""Measurements behind ``samo bench``.

kernels      compress, expand and the update, beside the bytes they must move
step         a training step in time and memory, beside dense and masked dense training

``contenders`` has the ways to train that are compared, ``timing`` the clock, ``rows`` the results.
"""
