"""A simulation of several models on one device, for the policy of ``kvpatch balance``.

No engine runs: the caches, the queues and the time are a model, the policy is kvpatch's own. It
tells policies apart, and says nothing about a machine.

traces    requests of real traces, as the models' loads
engine    one engine: its requests, its LRU cache on the device, its CPU tier
device    the engines on one device, in time, and who limits them
"""
