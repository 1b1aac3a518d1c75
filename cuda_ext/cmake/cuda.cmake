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

target_sources(raylm_kernels PRIVATE csrc/cuda/experts.cu csrc/cuda/tile_linear.cu)
# In a group a file that declares templates as instantiated elsewhere stands before the one that instantiates them.
add_group(decode cuda/decode_attention.cu cuda/decode_codes.cu cuda/decode_prefixes.cu)
add_group(patched_linear cuda/patched_linear.cu cuda/patched_linear_rows.cu cuda/patched_linear_int4.cu
  cuda/patched_linear_affine.cu cuda/patched_linear_int8.cu)
add_group(few_layers cuda/few_layers.cu cuda/few_mixture.cu)
add_group(patched_experts cuda/patched_experts.cu cuda/patched_experts_affine.cu cuda/patched_experts_floats.cu
  cuda/patched_experts_rows.cu)
add_group(attention cuda/prefill_hopper.cu cuda/prefill_attention.cu cuda/attention.cu cuda/prefixes.cu cuda/route.cu)
add_group(patched_floats cuda/patched_linear_floats.cu cuda/patched_linear_mxfp8.cu cuda/patched_linear_nf4.cu)
add_group(rows cuda/gated.cu cuda/logits.cu cuda/logprobs.cu cuda/norm.cu cuda/penalize.cu cuda/rope_store.cu cuda/rotary.cu
  cuda/rounded_rows.cu cuda/sample.cu cuda/scaled_rows.cu cuda/store_kv.cu cuda/tokens.cu)
add_group(peers cuda/all_gather.cu cuda/all_reduce.cu cuda/peer_memory.cu cuda/peer_norm.cu cuda/peer_split_norm.cu)
add_group(products cuda/gated_linear.cu cuda/linear.cu cuda/scaled_linear.cu cuda/split_linear.cu)
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
