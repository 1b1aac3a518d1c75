# Included where a CUDA compiler is found.
# Machine code alone: what is compiled for a newer GPU from an older one's PTX lacks the instructions that the launchers
# expect there.
list(TRANSFORM RAYLM_CUDA_ARCHS REPLACE "^([0-9]+[a-z]?)$" "\\1-real")
if("${RAYLM_CUDA_ARCHS}" MATCHES "virtual|all|native")
  message(FATAL_ERROR "RAYLM_CUDA_ARCHS is ${RAYLM_CUDA_ARCHS}; allowed: numbers such as 80, 90a or 90a-real")
endif()
set(CMAKE_CUDA_ARCHITECTURES ${RAYLM_CUDA_ARCHS})
enable_language(CUDA)
message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER} for ${RAYLM_CUDA_ARCHS}")

# This level is for host code, here the launchers, and -O1 compiles faster. It does not change the code of kernels.
string(REPLACE "-O3" "-O1" CMAKE_CUDA_FLAGS_RELEASE "${CMAKE_CUDA_FLAGS_RELEASE}")

# The files that take longest to compile come first, so that both cores of a small machine are busy until the end.
target_sources(raylm_kernels PRIVATE
  csrc/cuda/decode_attention.cu csrc/cuda/few_layers.cu csrc/cuda/few_mixture.cu csrc/cuda/patched_linear_int4.cu
  csrc/cuda/patched_experts_floats.cu csrc/cuda/patched_experts.cu csrc/cuda/patched_experts_affine.cu csrc/cuda/patched_experts_rows.cu
  csrc/cuda/decode_prefixes.cu csrc/cuda/decode_codes.cu csrc/cuda/prefill_hopper.cu csrc/cuda/tile_linear.cu
  csrc/cuda/experts.cu csrc/cuda/patched_linear_affine.cu csrc/cuda/prefill_attention.cu
  csrc/cuda/patched_linear_floats.cu csrc/cuda/patched_linear_int8.cu
  csrc/cuda/all_gather.cu csrc/cuda/all_reduce.cu csrc/cuda/attention.cu csrc/cuda/gated.cu
  csrc/cuda/gated_linear.cu csrc/cuda/linear.cu csrc/cuda/logits.cu csrc/cuda/logprobs.cu csrc/cuda/norm.cu csrc/cuda/patched_linear.cu
  csrc/cuda/patched_linear_mxfp8.cu csrc/cuda/patched_linear_nf4.cu csrc/cuda/patched_linear_rows.cu
  csrc/cuda/peer_memory.cu csrc/cuda/peer_norm.cu
  csrc/cuda/peer_split_norm.cu csrc/cuda/penalize.cu csrc/cuda/prefixes.cu csrc/cuda/rope_store.cu csrc/cuda/rotary.cu
  csrc/cuda/rounded_rows.cu csrc/cuda/route.cu csrc/cuda/sample.cu csrc/cuda/scaled_linear.cu csrc/cuda/scaled_rows.cu
  csrc/cuda/split_linear.cu csrc/cuda/store_kv.cu csrc/cuda/tokens.cu)
# wgmma's operands are written out one by one, for each type and width: a script does that.
set(WGMMA_FORMS ${CMAKE_BINARY_DIR}/include/raylm/cuda/ptx/wgmma_forms.cuh)
add_custom_command(OUTPUT ${WGMMA_FORMS}
  COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/include/raylm/cuda/ptx
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/wgmma_forms.py ${WGMMA_FORMS}
  DEPENDS cmake/wgmma_forms.py)
target_sources(raylm_kernels PRIVATE ${WGMMA_FORMS})
target_include_directories(raylm_kernels PRIVATE ${CMAKE_BINARY_DIR}/include)
# USE_CUDA shows the CUDA part of torch's stable ABI. The CUDA runtime is linked in, so that the library also loads
# where there is none.
target_compile_definitions(raylm_kernels PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:USE_CUDA>)
# Without it the kernels that need sm_90a have no code, and are not called.
if("${RAYLM_CUDA_ARCHS}" MATCHES "90a")
  target_compile_definitions(raylm_kernels PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:RAYLM_SM90A>)
endif()
if(RAYLM_RACECHECK)
  target_compile_definitions(raylm_kernels PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:RAYLM_RACECHECK>)
endif()
set_target_properties(raylm_kernels PROPERTIES
  CUDA_ARCHITECTURES "${RAYLM_CUDA_ARCHS}" CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_VISIBILITY_PRESET hidden
  CUDA_RUNTIME_LIBRARY Static)
