"""Training steps on a CUDA device that computes nothing: mixed devices are found, and waits for the GPU are counted.

No test machine has a GPU, and CUDA's paths must run somewhere. A library of two empty objects (device.cpp) makes a CPU build
of PyTorch take fake tensors on "cuda", which have shapes, types and devices but no numbers. Over them the real engine runs
its step beside mocked ranks, and a mode under every operation (:mod:`fakecuda.waits`) notes those that a GPU would make the
host wait for. What this cannot find: asserts inside kernels, races, wrong numbers.

``python -m fakecuda`` runs the cases of its standard input in a process of its own, so that nobody else's PyTorch is changed.
"""
