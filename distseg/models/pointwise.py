"""Pointwise layers and functions: each cell of the result depends on one cell of each map.

Norms and softmax are among the layers. Apart from the statistics of a norm, they read all channels
of only one cell. The functions have the names that PyTorch gives them. Their tensor arguments are
broadcast.
"""

from torch import nn

POINTWISE_LAYERS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.modules.dropout._DropoutNd,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Hardsigmoid,
    nn.Sigmoid,
    nn.LogSigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
    nn.Softmax,
    nn.LogSoftmax,
    nn.Softmax2d,
)

POINTWISE_FUNCTIONS = {
    *(
        "relu6 elu selu celu gelu silu mish softplus softsign hardtanh hardswish hardsigmoid "
        "sigmoid logsigmoid tanh tanhshrink softshrink hardshrink"
    ).split(),
    *(
        "exp expm1 log log1p log2 log10 sqrt rsqrt square reciprocal abs absolute neg negative "
        "sin cos tan atan atan2 erf clamp clamp_min clamp_max sign threshold"
    ).split(),
    *(
        "sub subtract rsub pow maximum minimum fmax fmin lerp addcmul addcdiv hypot logaddexp "
        "nan_to_num detach"
    ).split(),
    *(
        "__rsub__ __rtruediv__ __rdiv__ __pow__ __rpow__ where masked_fill clip gt lt ge le eq "
        "ne greater less __gt__ __lt__ __ge__ __le__ __eq__ __ne__"
    ).split(),
    *(
        "logical_and logical_or logical_not logical_xor __and__ __or__ __xor__ __invert__ "
        "bitwise_and bitwise_or bitwise_not floor ceil round trunc fmod remainder"
    ).split(),
    *("sinh cosh asinh heaviside xlogy isnan isinf isfinite floor_divide").split(),
}
