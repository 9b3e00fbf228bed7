"""Jobs for a cluster's batch system, made from a config: scripts, sweeps, scaling studies.

A script that asks for one number of processes but starts another number fails hours later, when the
job leaves the queue. So a script is made from what is known beforehand: the config's mesh, the
site's nodes and the options of the batch system. It is written only if these agree.
"""
