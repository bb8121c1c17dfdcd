"""Simulations of engines that share memory, for ``scripts/bench sharing``.

No engine runs: the caches, the queues and the time are a model, the policy, the keepers and the
ledger are kvpatch's own. They tell policies apart, and say nothing about a machine.

traces     requests of real traces, as the models' loads
engine     one engine: its requests, its LRU cache on the device, its CPU tier
device     the engines on one device, in time, and who limits them
arms       who limits them: nobody, equal parts, kvpatch's policy, one LRU over all
many       many models on one device, few of them busy
host_pool  engines of a host pool
"""
