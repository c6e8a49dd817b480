# Finds everything the project stands on and gathers it in one target, mgp::dependencies.
# Sets MGP_WITH_CUDA, MGP_WITH_NCCL and MGP_WITH_MPI to 0 or 1, here and as compile definitions of all targets.

find_package(Threads REQUIRED)
include(LibTorch)   # mgp::libtorch, MGP_TORCH_*, MGP_WITH_CUDA, MGP_WITH_NCCL

# ── MPI: the C interface only ────────────────────────────────────────────────────────────────────────────────────────
set(MGP_WITH_MPI 0)
set(MGP_MPI_WHY "MGP_MPI=OFF")
if(NOT MGP_MPI STREQUAL "OFF")
  find_package(MPI QUIET COMPONENTS C)
  if(MPI_C_FOUND)
    set(MGP_WITH_MPI 1)
    set(MGP_MPI_WHY "MPI ${MPI_C_VERSION}, ${MPIEXEC_EXECUTABLE}")
  elseif(MGP_MPI STREQUAL "ON")
    message(FATAL_ERROR "MGP_MPI=ON, but no MPI was found: sudo apt-get install libopenmpi-dev openmpi-bin")
  else()
    set(MGP_MPI_WHY "not found: sudo apt-get install libopenmpi-dev openmpi-bin")
  endif()
endif()

# ── small libraries ──────────────────────────────────────────────────────────────────────────
find_package(CLI11 2.1.2 QUIET)
if(NOT CLI11_FOUND)
  message(FATAL_ERROR "CLI11 2.1.2 or newer was not found: sudo apt-get install libcli11-dev")
endif()
find_package(nlohmann_json 3.9 QUIET)
if(NOT nlohmann_json_FOUND)
  message(FATAL_ERROR "nlohmann_json was not found: sudo apt-get install nlohmann-json3-dev")
endif()

add_library(mgp_dependencies INTERFACE)
add_library(mgp::dependencies ALIAS mgp_dependencies)
# LibTorch first: it also brings the include folder of the one NCCL, which must come before that of the CUDA toolkit.
target_link_libraries(mgp_dependencies INTERFACE mgp::libtorch CLI11::CLI11 nlohmann_json::nlohmann_json Threads::Threads
                                                 ${CMAKE_DL_LIBS})

# LibTorch carries fmt headers of its own in the folder that comes first. Linking the system's libfmt beside them gives
# undefined symbols, so fmt's few functions are compiled here from the headers that win (cmake/fmt.cpp, fmt 12). With any
# other version fmt is used header-only, which works too but makes each source file slower to compile.
set(fmt_version "")
if(EXISTS "${MGP_TORCH_ROOT}/include/fmt/base.h")
  file(STRINGS "${MGP_TORCH_ROOT}/include/fmt/base.h" fmt_version REGEX "define FMT_VERSION +[0-9]+")
  string(REGEX MATCH "[0-9]+" fmt_version "${fmt_version}")
endif()
if(fmt_version GREATER_EQUAL 120000 AND fmt_version LESS 130000)
  add_library(mgp_fmt STATIC "${PROJECT_SOURCE_DIR}/cmake/fmt.cpp")
  target_include_directories(mgp_fmt SYSTEM PRIVATE "${MGP_TORCH_ROOT}/include")
  set_target_properties(mgp_fmt PROPERTIES CXX_VISIBILITY_PRESET hidden)   # LibTorch keeps to its own copy
  target_link_libraries(mgp_dependencies INTERFACE mgp_fmt)
else()
  target_compile_definitions(mgp_dependencies INTERFACE FMT_HEADER_ONLY=1)
  if(NOT EXISTS "${MGP_TORCH_ROOT}/include/fmt/format.h")
    find_package(fmt QUIET)
    if(NOT fmt_FOUND)
      message(FATAL_ERROR "fmt was not found: sudo apt-get install libfmt-dev")
    endif()
    target_link_libraries(mgp_dependencies INTERFACE fmt::fmt-header-only)
  endif()
endif()

if(MGP_WITH_MPI)
  target_link_libraries(mgp_dependencies INTERFACE MPI::MPI_C)
  # mpi.h would else pull in the old C++ bindings, which need a library of their own.
  target_compile_definitions(mgp_dependencies INTERFACE OMPI_SKIP_MPICXX=1 MPICH_SKIP_MPICXX=1)
endif()

# Always defined, 0 or 1, and the same for all targets: #if MGP_WITH_CUDA.
add_compile_definitions(MGP_WITH_CUDA=${MGP_WITH_CUDA} MGP_WITH_NCCL=${MGP_WITH_NCCL} MGP_WITH_MPI=${MGP_WITH_MPI})
