"""The words in which memory is refused, as regular expressions.

One list for errors and logs (`workers.oom`) and for what `workers.capped` tells (`capped/hook`),
which loads this file by its path when a program has failed. So it imports nothing.
"""

#: Of a card, or of a memory that is not named: these mean a lack of memory and nothing else.
CARD = (
    r"(?:CUDA|HIP|XPU|MPS backend) (?:error: )?out of memory|PT_DEVMEM Allocation failed",
    r"CUDA driver error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaMalloc failed: out of memory",
    r"Triton Error \[(?:CUDA|HIP)\]: out of memory",
    # cudaMallocAsync says so after "Allocation on device" and its number.
    r"would exceed allowed memory\. \(out of memory\)",
    r"Failed to allocate a Tensor object",
)

#: Of the PC's RAM: torch, NumPy, C++ and the kernel.
HOST = (
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory:)",
    r"Unable to allocate [0-9.]+ (?:\w*i?B|bytes) for an array|\bbad_alloc\b|Cannot allocate memory",
)

#: They can also mean a bug of the program.
PROBABLE = (
    # Not initialised: at cublasCreate this is memory; elsewhere it can be an indexing bug.
    r"CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)",
    r"(?:HIPBLAS_STATUS|CUSOLVER_STATUS|CUSPARSE_STATUS|CUDNN_STATUS|CUFFT)_ALLOC_FAILED",
    r"CUDNN_STATUS_INTERNAL_ERROR_(?:HOST|DEVICE)_ALLOCATION_FAILED",
    r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    # cuDNN tries its algorithms, and what each of them raised for want of memory is not told.
    r"(?:GET|FIND) was unable to find an engine|Unable to find a valid cuDNN algorithm",
    # A library's kernel that got no memory for itself; a bad argument says so too.
    r"CUDNN_STATUS_(?:INTERNAL_ERROR|EXECUTION_FAILED)\b|CUBLAS_STATUS_INTERNAL_ERROR\b",
    r"!handles_\.at\(i\) INTERNAL ASSERT FAILED|CUDA driver error: device not ready",
    # oneDNN; followed by "descriptor" they mean an operation it cannot do, which is a bug.
    r"could not create a (?:primitive|memory)\b(?! desc)",
)

#: What a log says and no exception that is judged: JAX and XLA, TensorFlow and other frameworks.
#: What `workers.capped` prints is for people: its note tells programs.
LOGS = (
    r"RESOURCE_EXHAUSTED: (?:Out of memory|Failed to allocate)|OOM when allocating tensor",
    r"ran out of memory trying to allocate|OutOfMemoryError|CL_OUT_OF_(?:RESOURCES|HOST_MEMORY)",
    r"cudaErrorMemoryAllocation|ggml_backend_cuda_buffer_type_alloc_buffer: .* failed",
)

#: The same of the PC's RAM.
HOST_LOGS = (r"\b(?:_Array)?MemoryError\b|Out of memory: Killed process|\boom-kill\b|oom_reaper",)
