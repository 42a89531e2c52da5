# Finds a CUDA toolkit (nvcc >= 12.8) and NCCL (>= 2.28.7) and enables the language. Looked for, in order:
# EXPERTD_CUDA_ROOT, nvcc on PATH, /usr/local/cuda, the wheels that scripts/setup puts into build/cuda-venv.
# Defines expertd_cuda_runtime and expertd_nccl, and expertd_cuda_library beside expertd_library.

set(EXPERTD_CUDA_ROOT "" CACHE PATH "CUDA toolkit: the folder that holds bin/nvcc")
set(EXPERTD_NCCL_ROOT "" CACHE PATH "NCCL: the folder that holds include/nccl_device.h and lib")

file(GLOB _wheels LIST_DIRECTORIES true
  ${CMAKE_SOURCE_DIR}/build/cuda-venv/lib/python3*/site-packages/nvidia)
set(_cuda_wheels "")
set(_nccl_wheels "")
foreach(_folder ${_wheels})
  list(APPEND _cuda_wheels ${_folder}/cu13)
  list(APPEND _nccl_wheels ${_folder}/nccl)
endforeach()

if(EXPERTD_CUDA_ROOT)
  find_program(EXPERTD_NVCC nvcc PATHS ${EXPERTD_CUDA_ROOT}/bin NO_DEFAULT_PATH)
else()
  find_program(EXPERTD_NVCC nvcc HINTS ENV PATH PATHS /usr/local/cuda/bin)
  if(NOT EXPERTD_NVCC)
    list(TRANSFORM _cuda_wheels APPEND /bin OUTPUT_VARIABLE _wheel_bins)
    find_program(EXPERTD_NVCC nvcc PATHS ${_wheel_bins} NO_DEFAULT_PATH)
  endif()
endif()
if(NOT EXPERTD_NVCC)
  message(FATAL_ERROR "EXPERTD_CUDA is ON and no nvcc was found: run scripts/setup all, or set "
    "EXPERTD_CUDA_ROOT to a CUDA toolkit >= 12.8")
endif()
get_filename_component(_nvcc_real ${EXPERTD_NVCC} REALPATH)
get_filename_component(_cuda_root ${_nvcc_real}/../.. ABSOLUTE)

# The wheels have lib, a toolkit has lib64; nvcc itself only looks into lib64. Wheel nvcc also needs its
# libdevice and cicc beside it, which its profile finds relative to bin.
if(EXISTS ${_cuda_root}/lib/libcudart_static.a)
  set(_cuda_lib ${_cuda_root}/lib)
else()
  set(_cuda_lib ${_cuda_root}/lib64)
endif()
set(CMAKE_CUDA_COMPILER ${EXPERTD_NVCC})
set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
set(CMAKE_CUDA_ARCHITECTURES 90a-real)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_FLAGS_INIT "-L${_cuda_lib}")
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} at ${EXPERTD_NVCC} is too old: 12.8 or newer "
    "is needed (set EXPERTD_CUDA_ROOT)")
endif()

# CMake 3.25 does not know that nvcc speaks C++20 (later versions do); the standard itself is the
# top-level CMAKE_CXX_STANDARD.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_COMPILE_FEATURES "cuda_std_20")
  list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
endif()

# What host code needs: headers and the static runtime. Never libcuda: the driver is found at run time,
# so the binary also starts on a machine without one.
add_library(expertd_cuda_runtime INTERFACE)
target_include_directories(expertd_cuda_runtime SYSTEM INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(expertd_cuda_runtime INTERFACE ${_cuda_lib}/libcudart_static.a Threads::Threads
  ${CMAKE_DL_LIBS} rt)

find_path(EXPERTD_NCCL_INCLUDE nccl_device.h HINTS ${EXPERTD_NCCL_ROOT}/include ${_cuda_root}/include
  PATHS ${_nccl_wheels} PATH_SUFFIXES include)
# The wheel ships libnccl.so.2 only, without the development link.
find_library(EXPERTD_NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${EXPERTD_NCCL_ROOT}/lib ${_cuda_lib}
  PATHS ${_nccl_wheels} PATH_SUFFIXES lib)
if(NOT EXPERTD_NCCL_INCLUDE OR NOT EXPERTD_NCCL_LIBRARY)
  message(FATAL_ERROR "NCCL >= 2.28.7 with nccl_device.h was not found: run scripts/setup all, or set "
    "EXPERTD_NCCL_ROOT")
endif()
add_library(expertd_nccl INTERFACE)
target_include_directories(expertd_nccl SYSTEM INTERFACE ${EXPERTD_NCCL_INCLUDE})
target_link_libraries(expertd_nccl INTERFACE ${EXPERTD_NCCL_LIBRARY})

# --expt-relaxed-constexpr lets device code call the constexpr functions of kernels/layout.
target_compile_options(expertd_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-lineinfo;-Werror=all-warnings;-Xcompiler=-Wall,-Wextra,-Werror,-Wno-missing-field-initializers>")

# expertd_cuda_library(NAME SOURCES a.cu b.cc LINKS x y): expertd_library plus the CUDA runtime.
function(expertd_cuda_library name)
  expertd_library(${name} ${ARGN})
  target_link_libraries(${name} PUBLIC expertd_cuda_runtime)
endfunction()

message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION} from ${_cuda_root}; NCCL ${EXPERTD_NCCL_LIBRARY}")
