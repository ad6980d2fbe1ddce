"""Names of the operations of jax that compilers fuse into whatever reads their results."""

ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil",
    "clamp", "convert_element_type", "copy", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp",
    "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "log2",
    "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "nextafter", "not", "one_minus_square", "or",
    "population_count", "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub",
    "tan", "tanh", "xor",
}  # fmt: skip
# also of those that give elements another place
FUSED = ELEMENTWISE | {"broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "split", "iota", "pad", "rev"}
# operations whose results compilers hold rather than make again for each reader, unless products fuse with them
COSTLY = {"exp", "exp2", "expm1", "tanh", "erf", "erfc", "logistic", "log", "log1p", "pow", "sin", "cos", "div", "sqrt"}
