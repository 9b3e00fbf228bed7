"""Make jobs for a cluster's batch system from a config: scripts, sweeps, scaling studies.

A script that asks for one number of processes but starts another number fails hours later, when the
job leaves the queue. So a script is written only if the config's mesh, the site's nodes and the
options of the batch system agree.
"""
