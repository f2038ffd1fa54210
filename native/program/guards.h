// The engine's own kernels end the process where an operand is out of range (a division by zero), and one
// writes its result in another order than it was planned in. They stay what they are; each is called through
// a check of ours that fails the call instead, or that puts the result right.
#pragma once

namespace headrace {

// Puts the checks in front of the kernels that need one, in the engine's registry, for the whole process.
// Call once, before any method is loaded. Kernels that are not registered are passed over.
void guard_kernels();

}  // namespace headrace
