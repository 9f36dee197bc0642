"""Microbenchmarks of pylosses, installed as `pylosses.bench` and run by ``pylosses bench``.

shapes      named shapes from real use, and inputs of that shape for a loss
eager       losses as a user would write them, without guards
peers       other libraries: how to call them so that they compute the same number
providers   everybody who computes a loss: our backends, eager, torch.compile, torch's own, the peers
gate        is that the same number? A provider that disagrees never gets a time
stopwatch   turns, rounds, ratios within a round, peak memory
measure     one configuration, in a process of its own
run         which configurations, within how many minutes
report      the record, its table and pictures
bars        which promises about speed and memory the record keeps
parity      the arguments under which other libraries agree with ours, as a table
"""
