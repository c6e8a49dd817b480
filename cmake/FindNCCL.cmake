# Finds NCCL: NCCL_FOUND, NCCL_INCLUDE_DIR, NCCL_LIBRARY (full path), NCCL_VERSION.
#
# The NCCL that the LibTorch wheel brings lies beside it (site-packages/nvidia/nccl) and is the one that LibTorch loads:
# it comes first, and header and library are always taken from the same place. For a LibTorch without one (an unpacked
# zip) it is looked for in NCCL_ROOT, beside the CUDA toolkit and in the system's folders.

get_filename_component(_nccl_site_packages "${MGP_TORCH_ROOT}" DIRECTORY)
set(_nccl_wheel "${_nccl_site_packages}/nvidia/nccl")

if(NCCL_ROOT OR DEFINED ENV{NCCL_ROOT} OR NOT EXISTS "${_nccl_wheel}/lib/libnccl.so.2")
  find_path(NCCL_INCLUDE_DIR nccl.h
    HINTS ${NCCL_ROOT} $ENV{NCCL_ROOT} ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
  find_library(NCCL_LIBRARY NAMES libnccl.so.2 nccl
    HINTS ${NCCL_ROOT} $ENV{NCCL_ROOT} "${MGP_TORCH_ROOT}/lib" ${CUDAToolkit_LIBRARY_DIR} PATH_SUFFIXES lib lib64)
else()
  set(NCCL_INCLUDE_DIR "${_nccl_wheel}/include" CACHE PATH "Folder of nccl.h" FORCE)
  set(NCCL_LIBRARY "${_nccl_wheel}/lib/libnccl.so.2" CACHE FILEPATH "The NCCL library" FORCE)
endif()
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)

set(NCCL_VERSION "")
if(EXISTS "${NCCL_INCLUDE_DIR}/nccl.h")
  foreach(part MAJOR MINOR PATCH)
    file(STRINGS "${NCCL_INCLUDE_DIR}/nccl.h" _nccl_line REGEX "#define NCCL_${part} +[0-9]+")
    string(REGEX MATCH "[0-9]+" _nccl_number "${_nccl_line}")
    list(APPEND NCCL_VERSION "${_nccl_number}")
  endforeach()
  list(JOIN NCCL_VERSION "." NCCL_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR VERSION_VAR NCCL_VERSION)
