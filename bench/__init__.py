"""Microbenchmarks of pylosses, installed as `pylosses.bench` and run by ``pylosses bench``.

shapes      named shapes from real use, and inputs of that shape for a loss
eager       each loss as a user would write it, without guards
peers       other libraries: how to call them so that they compute the same number
providers   everybody who computes a loss: our backends, eager, torch.compile, torch's own, the peers
gate        is that the same number? A provider that disagrees never gets a time
timing      interleaved rounds, spread, noise, peak memory
worker      a process that measures one configuration at a time
run         which configurations; two workers for times, one for memory; rows on disk as they finish
report      table, JSON, pictures
bars        which speed bars are reached: the table of bars, the verdicts
contest     what a worker measures for a bar: its sides take turns
parity      the arguments under which other libraries agree with ours, as a table
"""
