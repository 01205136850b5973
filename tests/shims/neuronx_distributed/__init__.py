"""What train.neuron calls of neuronx_distributed, on torch.distributed's gloo and CPU tensors.

Names, arguments and their order, defaults, shapes and attributes are the package's own; how it
computes is not: no chip and no torch_xla are in it. tests/test_neuron.py runs train.neuron on it.
"""
