"""Capture: record the calls of a module's forward pass, and make a network of known layers of them.

::

    capture.py            the whole way from a module to its network
    trace.py              runs the module on the meta device and records its calls
                            draws.py, outside_reads.py, inplace.py, wide.py
    reader.py             goes through the traces of several image sizes, call by call
                            values.py stands for tensors; constants.py, following.py, by_type.py
    rules.py, rules_*.py  a method for each PyTorch function, which makes layers of its call
                            arranging.py, assigning.py, attending.py, depth.py, folding.py,
                            image_weights.py, lining.py, measures.py, moved.py, placing.py,
                            positions.py, products.py, reducing.py, regrouping.py
    compare.py            compares the network with the module, in float64
    checks.py             checks that a pass does nothing but compute its result
                            state.py, reachable.py, guarded.py, views.py
"""
