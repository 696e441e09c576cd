"""The mathematics of learning as pure functions: advantages, losses, KL, aggregation.

No device, process, file or log is touched here. Read table.py first, then advantages, losses and reducers, in
the order of the flow.
"""
