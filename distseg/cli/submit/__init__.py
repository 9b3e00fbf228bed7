"""Jobs for a cluster's batch system, made from a config: scripts, sweeps, scaling studies.

A script that asks for one number of processes and starts another one fails hours later, when it
leaves the queue. A script is therefore made from what is known beforehand: the config's mesh, the
site's nodes and the options of the batch system. It is only written if these agree.
"""
