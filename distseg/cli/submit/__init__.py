"""Jobs for a cluster's batch system, made from a config: scripts, sweeps, scaling studies.

A script that asks for one number of processes and starts another is found out hours later, in the queue's turn. So a
script is rendered from what is known beforehand: the config's mesh, the site's nodes, the batch system's words; and
nothing is written before these agree.
"""
