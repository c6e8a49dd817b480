# Finds LibTorch and, when it is to be used on GPUs, the CUDA runtime and the one NCCL that belong to it.
# Result: target mgp::libtorch, MGP_TORCH_ROOT, MGP_TORCH_VERSION, MGP_TORCH_PYTHON, MGP_WITH_CUDA, MGP_WITH_NCCL.
#
# Why not find_package(Torch)? Its config file looks for CUDA on this machine once more and then
#   - asks for nvToolsExt, which CUDA 12.9 and newer no longer have;
#   - needs nvcc, the static libraries and a list of GPU architectures, though we compile no kernel for it;
#   - fails with CMake 3.25 and nvcc 13 when the C++ standard is 20;
#   - puts the toolkit's library folder, which often holds another libnccl.so.2, before LibTorch's own;
#   - cannot do without CUDA when the LibTorch at hand was built with it.
# What we need from it are five libraries and two include folders, so they are named here. The places searched are the
# same: Torch_DIR, CMAKE_PREFIX_PATH, and then what is usual for this project.

set(MGP_TORCH_OLDEST 2.9)

# ── where ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# mgp_torch_at(<variable> <folder>): the LibTorch root if the folder is one, else empty.
function(mgp_torch_at result folder)
  set(${result} "" PARENT_SCOPE)
  if(folder AND EXISTS "${folder}/lib/libtorch_cpu.so" AND EXISTS "${folder}/include/torch/csrc/api/include/torch/torch.h")
    file(REAL_PATH "${folder}" folder)
    set(${result} "${folder}" PARENT_SCOPE)
  endif()
endfunction()

function(mgp_torch_version result root)
  set(version "")
  if(EXISTS "${root}/share/cmake/Torch/TorchConfigVersion.cmake")
    file(STRINGS "${root}/share/cmake/Torch/TorchConfigVersion.cmake" line REGEX "PACKAGE_VERSION +\"" LIMIT_COUNT 1)
    string(REGEX MATCH "[0-9]+\\.[0-9]+(\\.[0-9]+)?" version "${line}")
  endif()
  set(${result} "${version}" PARENT_SCOPE)
endfunction()

# The folder of the package torch in a Python, without importing it (that takes seconds).
function(mgp_torch_of_python result python)
  set(${result} "" PARENT_SCOPE)
  execute_process(
    COMMAND "${python}" -c
      "import importlib.util as u; s = u.find_spec('torch'); print(list(s.submodule_search_locations)[0] if s else '')"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
  if(status EQUAL 0 AND folder)
    mgp_torch_at(root "${folder}")
    set(${result} "${root}" PARENT_SCOPE)
  endif()
endfunction()

set(found "")
set(origin "")

# 1. What the user says.
set(asked "")
if(Torch_DIR)
  list(APPEND asked "${Torch_DIR}/../../..")
endif()
if(DEFINED ENV{Torch_DIR})
  list(APPEND asked "$ENV{Torch_DIR}/../../..")
endif()
list(APPEND asked ${CMAKE_PREFIX_PATH})
if(DEFINED ENV{CMAKE_PREFIX_PATH})
  string(REPLACE ":" ";" prefixes "$ENV{CMAKE_PREFIX_PATH}")
  list(APPEND asked ${prefixes})
endif()
foreach(folder IN LISTS asked)
  # torch.utils.cmake_prefix_path names <root>/share/cmake, the others name the root.
  foreach(candidate "${folder}" "${folder}/../..")
    if(NOT found)
      mgp_torch_at(found "${candidate}")
      set(origin "named by Torch_DIR or CMAKE_PREFIX_PATH")
    endif()
  endforeach()
endforeach()
if(Torch_DIR AND NOT found)
  message(FATAL_ERROR "Torch_DIR=${Torch_DIR} is not inside a LibTorch: it should be <LibTorch>/share/cmake/Torch.")
endif()

# 2. What the last configure found.
if(NOT found AND MGP_TORCH_ROOT)
  mgp_torch_at(found "${MGP_TORCH_ROOT}")
  set(origin "found before")
endif()

# 3. The active Python, and 4. the environment that scripts/setup.sh makes, shared by all clones.
file(STRINGS "${PROJECT_SOURCE_DIR}/scripts/requirements.txt" pinned REGEX "^torch==")
string(REGEX REPLACE "^torch==([0-9.]+).*" "\\1" pinned "${pinned}")
if(DEFINED ENV{XDG_CACHE_HOME} AND NOT "$ENV{XDG_CACHE_HOME}" STREQUAL "")
  set(cache "$ENV{XDG_CACHE_HOME}")
else()
  set(cache "$ENV{HOME}/.cache")
endif()
set(MGP_SETUP_PYTHON "${cache}/multi-gpu-playground/torch-${pinned}/bin/python3")
foreach(python python3 "${MGP_SETUP_PYTHON}")
  if(NOT found)
    mgp_torch_of_python(candidate "${python}")
    if(candidate)
      mgp_torch_version(version "${candidate}")
      if(version VERSION_LESS MGP_TORCH_OLDEST)
        message(STATUS "LibTorch ${version} in ${candidate} is too old for us, looking on")
      else()
        set(found "${candidate}")
        set(origin "package torch of ${python}")
      endif()
    endif()
  endif()
endforeach()

if(NOT found)
  message(FATAL_ERROR "LibTorch was not found: run scripts/setup.sh, or name yours with "
                      "-DCMAKE_PREFIX_PATH=<folder of LibTorch>.")
endif()
set(MGP_TORCH_ROOT "${found}" CACHE PATH "The LibTorch in use" FORCE)
mgp_torch_version(MGP_TORCH_VERSION "${MGP_TORCH_ROOT}")
if(MGP_TORCH_VERSION VERSION_LESS MGP_TORCH_OLDEST)
  message(FATAL_ERROR "LibTorch ${MGP_TORCH_VERSION} in ${MGP_TORCH_ROOT} is too old: "
                      "${MGP_TORCH_OLDEST} or newer is needed.")
endif()
# Builds before 2.7 or so used the old string ABI of libstdc++ and would give hundreds of undefined references.
set(abi "")
if(EXISTS "${MGP_TORCH_ROOT}/share/cmake/Torch/TorchConfig.cmake")
  file(STRINGS "${MGP_TORCH_ROOT}/share/cmake/Torch/TorchConfig.cmake" abi REGEX "_GLIBCXX_USE_CXX11_ABI=0")
endif()
if(abi)
  message(FATAL_ERROR "The LibTorch in ${MGP_TORCH_ROOT} was built with the old string ABI: take the build named "
                      "\"cxx11 ABI\", or the one that scripts/setup.sh installs.")
endif()

# The Python that belongs to this LibTorch runs the comparisons with PyTorch. An unpacked zip has none: then the one
# that scripts/setup.sh made, or the active one.
get_filename_component(site_packages "${MGP_TORCH_ROOT}" DIRECTORY)
get_filename_component(python_prefix "${site_packages}/../../.." ABSOLUTE)
set(MGP_TORCH_PYTHON "")
if(site_packages MATCHES "-packages$" AND EXISTS "${python_prefix}/bin/python3")
  set(MGP_TORCH_PYTHON "${python_prefix}/bin/python3")
else()
  mgp_torch_of_python(candidate python3)
  if(NOT candidate AND EXISTS "${MGP_SETUP_PYTHON}")
    set(MGP_TORCH_PYTHON "${MGP_SETUP_PYTHON}")
  else()
    find_program(MGP_ACTIVE_PYTHON python3)
    set(MGP_TORCH_PYTHON "${MGP_ACTIVE_PYTHON}")
  endif()
endif()

# ── CUDA ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
# The headers are enough for us: the libraries come with LibTorch. They are taken from a toolkit of the same major
# version, or, where there is none, from LibTorch's own packages when these are complete (scripts/requirements.txt).
set(MGP_WITH_CUDA 0)
set(MGP_CUDA_WHY "MGP_CUDA=OFF")
set(cuda_problem "")
if(NOT MGP_CUDA STREQUAL "OFF")
  set(cuda_major "")
  set(cuda_include "")
  if(EXISTS "${MGP_TORCH_ROOT}/version.py")
    file(STRINGS "${MGP_TORCH_ROOT}/version.py" line REGEX "^cuda")
    string(REGEX MATCH "'([0-9]+)\\.[0-9]+'" line "${line}")
    set(cuda_major "${CMAKE_MATCH_1}")
  elseif(EXISTS "${MGP_TORCH_ROOT}/build-version")
    file(STRINGS "${MGP_TORCH_ROOT}/build-version" line REGEX "\\+cu" LIMIT_COUNT 1)
    string(REGEX MATCH "\\+cu([0-9][0-9])" line "${line}")
    set(cuda_major "${CMAKE_MATCH_1}")
  endif()
  set(wheel_cuda "${site_packages}/nvidia/cu${cuda_major}")

  if(NOT EXISTS "${MGP_TORCH_ROOT}/lib/libtorch_cuda.so")
    set(cuda_problem "the LibTorch in ${MGP_TORCH_ROOT} is a build for CPUs: take one for CUDA")
  else()
    find_package(CUDAToolkit QUIET)
    if(CUDAToolkit_FOUND AND (NOT cuda_major OR CUDAToolkit_VERSION_MAJOR EQUAL cuda_major))
      set(cuda_include ${CUDAToolkit_INCLUDE_DIRS})
      set(MGP_CUDA_WHY "CUDA toolkit ${CUDAToolkit_VERSION}")
    elseif(EXISTS "${wheel_cuda}/include/cuda_runtime_api.h" AND EXISTS "${wheel_cuda}/include/crt/host_defines.h")
      set(cuda_include "${wheel_cuda}/include")
      set(MGP_CUDA_WHY "CUDA ${cuda_major} headers of LibTorch's packages")
    elseif(CUDAToolkit_FOUND)
      set(cuda_problem "LibTorch is built for CUDA ${cuda_major}, the toolkit found is ${CUDAToolkit_VERSION}: install \
cuda-toolkit-${cuda_major} from NVIDIA's repository")
    else()
      set(cuda_problem "no CUDA toolkit was found: install cuda-toolkit-${cuda_major} from NVIDIA's repository, or run \
\"${MGP_TORCH_PYTHON} -m pip install nvidia-cuda-crt==${cuda_major}.*\"")
    endif()
  endif()

  # The CUDA runtime that LibTorch loads is the one to link: a second copy would be a second state.
  if(cuda_include)
    file(GLOB cudart "${wheel_cuda}/lib/libcudart.so.*" "${site_packages}/nvidia/cuda_runtime/lib/libcudart.so.*"
                     "${MGP_TORCH_ROOT}/lib/libcudart*.so*")
    if(cudart)
      list(GET cudart 0 cudart)
    elseif(CUDAToolkit_FOUND)
      set(cudart CUDA::cudart)
    else()
      set(cuda_problem "no libcudart.so was found beside LibTorch: install cuda-toolkit-${cuda_major}")
    endif()
  endif()

  if(NOT cuda_problem)
    set(MGP_WITH_CUDA 1)
  elseif(MGP_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MGP_CUDA=ON, but ${cuda_problem}.")
  else()
    set(MGP_CUDA_WHY "${cuda_problem}")
  endif()
endif()

# ── NCCL: exactly one in the process, the one LibTorch loads ─────────────────────────────────────────────────────────
set(MGP_WITH_NCCL 0)
set(MGP_NCCL_WHY "MGP_NCCL=OFF")
if(NOT MGP_NCCL STREQUAL "OFF")
  if(MGP_WITH_CUDA)
    find_package(NCCL QUIET)
    if(NCCL_FOUND)
      set(MGP_WITH_NCCL 1)
      set(MGP_NCCL_WHY "NCCL ${NCCL_VERSION}, ${NCCL_LIBRARY}")
    else()
      set(MGP_NCCL_WHY "nccl.h or libnccl.so.2 was not found: install libnccl-dev and libnccl2 from NVIDIA's \
repository, or name its folder with -DNCCL_ROOT=")
    endif()
  else()
    set(MGP_NCCL_WHY "CUDA is off")
  endif()
  if(NOT MGP_WITH_NCCL AND (MGP_NCCL STREQUAL "ON" OR (MGP_CUDA STREQUAL "ON" AND MGP_WITH_CUDA)))
    message(FATAL_ERROR "GPU ranks were asked for, but ${MGP_NCCL_WHY}.")
  endif()
endif()

# ── the target ───────────────────────────────────────────────────────────────────────────────────────────────────────
add_library(mgp_libtorch INTERFACE)
add_library(mgp::libtorch ALIAS mgp_libtorch)
set(torch_libraries "${MGP_TORCH_ROOT}/lib/libtorch_cpu.so" "${MGP_TORCH_ROOT}/lib/libc10.so")
set(rpath "")
if(MGP_WITH_NCCL)
  target_include_directories(mgp_libtorch SYSTEM INTERFACE "${NCCL_INCLUDE_DIR}")
  target_link_libraries(mgp_libtorch INTERFACE "${NCCL_LIBRARY}")
  get_filename_component(folder "${NCCL_LIBRARY}" DIRECTORY)
  list(APPEND rpath "${folder}")
endif()
list(APPEND rpath "${MGP_TORCH_ROOT}/lib")
target_include_directories(mgp_libtorch SYSTEM INTERFACE
  "${MGP_TORCH_ROOT}/include" "${MGP_TORCH_ROOT}/include/torch/csrc/api/include")
target_compile_definitions(mgp_libtorch INTERFACE USE_DISTRIBUTED)
if(MGP_WITH_CUDA)
  target_include_directories(mgp_libtorch SYSTEM INTERFACE ${cuda_include})
  # Nothing refers to a symbol of libtorch_cuda.so: it registers its kernels when it is loaded, so it must be kept.
  # libstdc++ comes first: libtorch.so exports an old copy of std::filesystem whose remove_all crashes.
  target_link_libraries(mgp_libtorch INTERFACE
    "-Wl,--push-state,--no-as-needed,-lstdc++,${MGP_TORCH_ROOT}/lib/libtorch.so,${MGP_TORCH_ROOT}/lib/libtorch_cuda.so,--pop-state"
    "${MGP_TORCH_ROOT}/lib/libc10_cuda.so" ${cudart})
  if(EXISTS "${cudart}")
    get_filename_component(folder "${cudart}" DIRECTORY)
    list(APPEND rpath "${folder}")
  endif()
endif()
target_link_libraries(mgp_libtorch INTERFACE ${torch_libraries})

# RPATH, not RUNPATH: it is searched before LD_LIBRARY_PATH, which on many machines names a toolkit folder with another
# libnccl.so.2 in it. (To try another NCCL on purpose, use LD_PRELOAD; the programs then say that versions differ.)
list(REMOVE_DUPLICATES rpath)
set(CMAKE_BUILD_RPATH ${rpath})
add_link_options("LINKER:--disable-new-dtags")
