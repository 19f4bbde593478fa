"""The texts of refused memory, as regular expressions.

One list for exceptions and logs (`workers.oom`) and for the report of `workers.capped`
(`capped/hook`), which loads this file by its path after a program has failed. So it imports
nothing.
"""

#: Memory of a card, or unspecified: these texts mean a lack of memory and nothing else.
CARD = (
    r"(?:CUDA|HIP|XPU|MPS backend) (?:error: )?out of memory|PT_DEVMEM Allocation failed",
    r"CUDA driver error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaMalloc failed: out of memory",
    r"Triton Error \[(?:CUDA|HIP)\]: out of memory",
    # cudaMallocAsync says so after "Allocation on device" and its number.
    r"would exceed allowed memory\. \(out of memory\)",
    r"Failed to allocate a Tensor object",
)

#: RAM of the PC: texts of torch, NumPy, C++ and the kernel.
HOST = (
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory:)",
    r"Unable to allocate [0-9.]+ (?:\w*i?B|bytes) for an array|\bbad_alloc\b|Cannot allocate memory",
)

#: These texts can also mean a bug of the program.
PROBABLE = (
    # NOT_INITIALIZED: a lack of memory in cublasCreate; elsewhere it can be an indexing bug.
    r"CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)",
    r"(?:HIPBLAS_STATUS|CUSOLVER_STATUS|CUSPARSE_STATUS|CUDNN_STATUS|CUFFT)_ALLOC_FAILED",
    r"CUDNN_STATUS_INTERNAL_ERROR_(?:HOST|DEVICE)_ALLOCATION_FAILED",
    r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    # cuDNN tries its algorithms, and does not report which of them lacked memory.
    r"(?:GET|FIND) was unable to find an engine|Unable to find a valid cuDNN algorithm",
    # A kernel of a library that got no memory for itself; a bad argument gives the same text.
    r"CUDNN_STATUS_(?:INTERNAL_ERROR|EXECUTION_FAILED)\b|CUBLAS_STATUS_INTERNAL_ERROR\b",
    r"!handles_\.at\(i\) INTERNAL ASSERT FAILED|CUDA driver error: device not ready",
    # oneDNN; followed by "descriptor" the text means an unsupported operation, which is a bug.
    r"could not create a (?:primitive|memory)\b(?! desc)",
)

#: Only in logs, not in exceptions that are judged: JAX and XLA, TensorFlow and other frameworks.
#: The output of `workers.capped` has no pattern: it is for people, and programs read its note.
LOGS = (
    r"RESOURCE_EXHAUSTED: (?:Out of memory|Failed to allocate)|OOM when allocating tensor",
    r"ran out of memory trying to allocate|OutOfMemoryError|CL_OUT_OF_(?:RESOURCES|HOST_MEMORY)",
    r"cudaErrorMemoryAllocation|ggml_backend_cuda_buffer_type_alloc_buffer: .* failed",
)

#: The same for RAM of the PC.
HOST_LOGS = (r"\b(?:_Array)?MemoryError\b|Out of memory: Killed process|\boom-kill\b|oom_reaper",)
