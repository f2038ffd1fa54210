"""headrace: exported PyTorch programs on the one CUDA stream the caller chose, without libtorch."""
