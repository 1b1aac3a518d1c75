# Included where a CUDA compiler is found.
set(CMAKE_CUDA_ARCHITECTURES ${RAYLM_CUDA_ARCHS})
enable_language(CUDA)
message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER} for ${RAYLM_CUDA_ARCHS}")
