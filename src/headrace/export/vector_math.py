"""Vector functions that Inductor's code calls by SLEEF's names, which libtorch holds and nothing else here does.

PyTorch's vector headers (``ATen/cpu/vec``) call SLEEF for exp, tanh and their like. Each library gets its own,
hidden ones: the C library's functions, element by element.
"""

from __future__ import annotations

__all__ = ["source"]

# SLEEF's name without type and width -> the function of <cmath>, and how SLEEF marks its accuracy.
UNARY = {
    **{name: (name, "_u10") for name in ["acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "exp", "exp2", "expm1", "lgamma", "log", "log10", "log1p", "log2", "sin", "sinh", "tan", "tanh"]},
    "erfc": ("erfc", "_u15"),
}  # fmt: skip
BINARY = {
    "atan2": ("atan2", "_u10"),
    "copysign": ("copysign", ""),
    "fmod": ("fmod", ""),
    "hypot": ("hypot", "_u05"),
    "nextafter": ("nextafter", ""),
    "pow": ("pow", "_u10"),
}
# Of lower accuracy, for float alone.
ROUGH = {"cos": ("cos", "_u35"), "sin": ("sin", "_u35")}

HEAD = """
#include <cmath>
#include <cstring>

#define HEADRACE_EACH(name, V, S, function)                                            \\
  extern "C" __attribute__((visibility("hidden"))) V name(V x) {                       \\
    S a[sizeof(V) / sizeof(S)];                                                        \\
    std::memcpy(a, &x, sizeof(V));                                                     \\
    for (S& e : a) e = std::function(e);                                               \\
    std::memcpy(&x, a, sizeof(V));                                                     \\
    return x;                                                                          \\
  }
#define HEADRACE_EACH_TWO(name, V, S, function)                                        \\
  extern "C" __attribute__((visibility("hidden"))) V name(V x, V y) {                  \\
    S a[sizeof(V) / sizeof(S)], b[sizeof(V) / sizeof(S)];                              \\
    std::memcpy(a, &x, sizeof(V));                                                     \\
    std::memcpy(b, &y, sizeof(V));                                                     \\
    for (unsigned i = 0; i < sizeof(V) / sizeof(S); ++i) a[i] = std::function(a[i], b[i]); \\
    std::memcpy(&x, a, sizeof(V));                                                     \\
    return x;                                                                          \\
  }
"""


def source(vector_bits: int) -> str:
    """C++ that defines them for vectors of this width, 256 or 512; nothing for another."""
    if vector_bits not in (256, 512):
        return ""
    lines = [HEAD]
    for scalar, letter, suffix in (("float", "f", ""), ("double", "d", "d")):
        vector = f"__m{vector_bits}{suffix}"
        width = vector_bits // (32 if scalar == "float" else 64)
        for macro, names in (
            ("HEADRACE_EACH", UNARY),
            ("HEADRACE_EACH_TWO", BINARY),
            ("HEADRACE_EACH", ROUGH),
        ):
            if names is ROUGH and scalar == "double":
                continue
            lines += [
                f"{macro}(Sleef_{name}{letter}{width}{accuracy}, {vector}, {scalar}, {function})"
                for name, (function, accuracy) in names.items()
            ]
    return "\n".join(lines) + "\n"
